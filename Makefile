# `make demo` and `make test` do everything on a fresh machine: they create .venv, install tpf_jit with what it needs, and
# run. Where $(PYTHON) already has the packages (a GPU host without network, a prepared container), that Python is used
# as it is: nothing is installed, nothing is fetched.

PYTHON ?= python3
VENV ?= .venv
# Users bring their own torch; the development environment pins one so that a loose requirement cannot change under it.
TORCH_SPEC ?= torch==2.13.0
EXTRAS ?= cu13,dev
JOBS ?= 2
PYTEST_ARGS ?=

RUNTIME := torch cutlass tvm_ffi optuna sqlite_utils platformdirs rich typer
FOUND := import importlib.util as u, sys; sys.exit(any(u.find_spec(m) is None for m in sys.argv[1:]))
have = $(shell $(PYTHON) -c "$(FOUND)" $(1) 2>/dev/null && echo yes)

# The demo wants no test tools.
NEEDED := $(RUNTIME) $(if $(filter-out demo,$(or $(MAKECMDGOALS),help)),pytest)
READY := $(call have,$(NEEDED))
ifeq ($(READY),yes)
  PY := $(PYTHON)
  SETUP :=
  export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
  PY := $(VENV)/bin/python
  SETUP := $(VENV)/.installed
endif

.DEFAULT_GOAL := help
.PHONY: help demo test lint wheel clean

help:
	@echo "make demo    set up if needed, then tune, dispatch and compare on this machine"
	@echo "make test    set up if needed, then lint and run the tests"
	@echo "make lint    ruff over the whole tree"
	@echo "make wheel   build dist/tpf_jit-*.whl"
	@echo "make clean   remove what make created"

demo: $(SETUP)
	@$(PY) -m tpf_jit.cli demo

# xdist runs the CPU and compile tests on two cores; GPU tests share one group, so one worker owns the GPU.
test: lint
	@if $(PY) -c "$(FOUND)" xdist; then jobs="-n $(JOBS) --dist loadgroup"; else jobs=""; fi; \
	$(PY) -m pytest $$jobs $(PYTEST_ARGS)

lint: $(SETUP)
	@if $(PY) -c "$(FOUND)" ruff; then $(PY) -m ruff check .; else echo "lint skipped: ruff is not installed in this Python"; fi

wheel: $(SETUP)
	@$(PY) -m pip wheel -q --no-deps --no-build-isolation -w dist . && ls dist

$(VENV)/.installed: pyproject.toml Makefile
	@echo "setting up $(VENV) (once; a few minutes where packages have to be downloaded)"
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10))" || { echo "Error: tpf_jit needs Python 3.10 or newer; set PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "Error: $(PYTHON) has no venv module (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@$(VENV)/bin/python -m pip install -q "$(TORCH_SPEC)" "setuptools>=77"
	@$(VENV)/bin/python -m pip install -q -e ".[$(EXTRAS)]" "$(TORCH_SPEC)"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
