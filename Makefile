# make help: what there is. Variables: PYTHON (the interpreter the environment is made from), VENV,
# TEST_EXTRAS, TEST_WORKERS, PYTEST_ARGS, DEMO_ARGS, BENCH_ARGS, VLLM_VENV.

PYTHON      ?= python3
VENV        ?= .venv
VLLM_VENV   ?= .venv-vllm
TEST_EXTRAS ?= test,transformers,gpu
TEST_WORKERS ?= auto
PYTEST_ARGS ?=
DEMO_ARGS   ?=
BENCH_ARGS  ?=

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PY   := "$(VENV)/bin/python"
PIP  := $(PY) -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt
DEPS := pyproject.toml constraints.txt

# One stamp for each set of extras. Nothing is installed, and no network needed, while a stamp is newer
# than the two files that decide what is installed.
comma := ,
BASE_STAMP := $(VENV)/.stamp-base
DEMO_STAMP := $(VENV)/.stamp-transformers
TEST_STAMP := $(VENV)/.stamp-$(subst $(comma),-,$(TEST_EXTRAS))
DEV_STAMP  := $(VENV)/.stamp-dev

.PHONY: help demo test test-slow test-vllm native native-check lint format bench install clean

help:
	@echo "make demo     save a prompt's KV cache, load it in a new process (CPU is enough)"
	echo "make test     the tests to run before a commit (PYTEST_ARGS='-k name')"
	echo "make test-slow   the tests marked slow"
	echo "make test-vllm  the tests with a real vLLM (CPU build, 3.4 GB, in $(VLLM_VENV))"
	echo "make native   compile the native library into kvfs/native (a C compiler is needed)"
	echo "make native-check  the tests of native/ in C, under sanitizers"
	echo "make lint     ruff and mypy"
	echo "make format   let ruff rewrite the files"
	echo "make bench    tools/bench.py                  (BENCH_ARGS=...)"
	echo "make install  the environment for all of these, in $(VENV)"
	echo "make clean    remove $(VENV), $(VLLM_VENV), caches and build outputs"

# The build backend is installed from the same pins, so that building the package asks the network for nothing.
$(BASE_STAMP): $(DEPS)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 10) <= v < (3, 14) else "kvfs needs Python 3.10 to 3.13; PYTHON=$(PYTHON) is %d.%d" % v[:2])'
	test -x $(PY) || $(PYTHON) -m venv "$(VENV)"
	$(PIP) hatchling editables
	touch "$@"

$(DEMO_STAMP): $(BASE_STAMP)
	@echo "installing kvfs[transformers] into $(VENV)"
	$(PIP) --no-build-isolation -e ".[transformers]"
	touch "$@"

$(TEST_STAMP): $(BASE_STAMP)
	@echo "installing kvfs[$(TEST_EXTRAS)] into $(VENV)"
	$(PIP) --no-build-isolation -e ".[$(TEST_EXTRAS)]"
	touch "$@"

$(DEV_STAMP): $(BASE_STAMP)
	@echo "installing kvfs[dev] into $(VENV)"
	$(PIP) --no-build-isolation -e ".[dev]"
	touch "$@"

# The engine pins its own torch, so it gets its own environment. torch comes first, by itself; the rest is a complete
# list of exact versions.
VLLM_PIP   := "$(VLLM_VENV)/bin/python" -m pip install -qq --disable-pip-version-check --no-input
VLLM_STAMP := $(VLLM_VENV)/.stamp
$(VLLM_STAMP): pyproject.toml tests/vllm/requirements.txt
	@test -x "$(VLLM_VENV)/bin/python" || $(PYTHON) -m venv "$(VLLM_VENV)"
	echo "installing vLLM into $(VLLM_VENV)"
	$(VLLM_PIP) torch==2.13.0
	$(VLLM_PIP) --no-deps -r tests/vllm/requirements.txt
	$(VLLM_PIP) --no-deps --no-build-isolation -e .
	touch "$@"

# Without a compiler, everything works in Python. The tests say which one they ran with.
NATIVE_LIB := kvfs/native/_kvfs_native.so
$(NATIVE_LIB): $(wildcard native/*.c native/*.h) tools/build_native.py
	@$(PYTHON) -m tools.build_native || echo "going on without the native library"

native:
	@$(PYTHON) -m tools.build_native

native-check:
	@$(PYTHON) -m tools.build_native --check

install: $(DEMO_STAMP) $(TEST_STAMP) $(DEV_STAMP)

demo: $(DEMO_STAMP)
	@$(PY) -m tools.demo $(DEMO_ARGS)

# Tests are independent of each other: several processes share them.
PYTEST := $(PY) -m pytest -n $(TEST_WORKERS) --maxprocesses 4 --dist worksteal

test: $(TEST_STAMP) $(NATIVE_LIB)
	@$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-slow: $(TEST_STAMP) $(NATIVE_LIB)
	@$(PYTEST) -m slow $(PYTEST_ARGS)

test-vllm: $(VLLM_STAMP)
	@"$(VLLM_VENV)/bin/python" -m pytest tests/vllm --timeout 300 $(PYTEST_ARGS)

lint: $(DEV_STAMP)
	@$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict kvfs

format: $(DEV_STAMP)
	@$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(DEMO_STAMP) $(NATIVE_LIB)
	@$(PY) tools/bench.py $(BENCH_ARGS)

clean:
	@if [ -e "$(BASE_STAMP)" ] || [ -e "$(VENV)/pyvenv.cfg" ]; then rm -rf -- "$(VENV)"; fi
	@if [ -e "$(VLLM_STAMP)" ]; then rm -rf -- "$(VLLM_VENV)"; fi
	rm -rf -- build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find kvfs tests tools -name __pycache__ -type d -prune -exec rm -rf -- {} +
