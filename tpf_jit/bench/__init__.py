"""Benches: tpf_jit beside its peers on one GPU, as records (`tpf_jit.records` keeps them; format in docs).

    attention.py   triangle attention, forward and backward, interleaved with every peer that is installed
    accuracy.py    triangle attention and its gradients against float64, case by case, and repeated calls bit by bit
    multiplication.py, multiplication_accuracy.py  the same of the triangle multiplicative update, with multiplication_peers.py
    interleaved.py how benches time implementations in turns
    search.py      how near to the best a search comes that may try a share of all configurations
    latency.py     overhead of a call, and time from import to the first result in a new process
    environment.py the device, its clock, and the head of a record
    peers.py       who is measured; peer_base.py what that takes, other_peers.py how each library is called

Every function returns the record as a plain dict and writes nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

_EXPORTS = {
    "AccuracySettings": "accuracy",
    "MultiplicationAccuracySettings": "multiplication_accuracy",
    "accuracy_multiplication": "multiplication_accuracy",
    "BenchSettings": "attention",
    "accuracy_attention": "accuracy",
    "bench_attention": "attention",
    "bench_latency": "latency",
    "bench_multiplication": "multiplication",
    "multiplication_peers": "multiplication_peers",
    "bench_search": "search",
    "RoundSettings": "interleaved",
    "SearchSettings": "search",
    "peers": "peers",
}

__all__ = [
    "AccuracySettings",
    "BenchSettings",
    "MultiplicationAccuracySettings",
    "RoundSettings",
    "SearchSettings",
    "accuracy_attention",
    "accuracy_multiplication",
    "bench_attention",
    "bench_latency",
    "bench_multiplication",
    "bench_search",
]

if TYPE_CHECKING:
    from .accuracy import AccuracySettings, accuracy_attention
    from .attention import BenchSettings, bench_attention
    from .interleaved import RoundSettings
    from .latency import bench_latency
    from .multiplication import bench_multiplication
    from .multiplication_accuracy import MultiplicationAccuracySettings, accuracy_multiplication
    from .search import SearchSettings, bench_search


def __getattr__(name: str):
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    loaded = import_module(f".{module}", __name__)
    return loaded if name == module else getattr(loaded, name)
