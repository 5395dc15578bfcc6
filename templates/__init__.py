"""Kernel templates: one class per kernel family, direction and architecture.

Imports as ``tpf_jit.templates``. Import-light on purpose: neither torch nor the CuTe DSL is loaded here;
a template imports ``cutlass`` only while it compiles and ``torch`` only in its reference and workload.
"""
