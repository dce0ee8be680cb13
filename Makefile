# make help: what there is. Variables: PYTHON (the interpreter the environment is made from), VENV,
# TEST_EXTRAS, TEST_WORKERS, PYTEST_ARGS, DEMO_ARGS, BENCH_ARGS, VLLM_VENV, VLLM_NEXT (a version; default: the newest),
# ENGINES_VENV, CEPH, MUTANTS, MUTANTS_SIZE, MUTANTS_SEED, MUTANTS_SECONDS.

PYTHON      ?= python3
VENV        ?= .venv
VLLM_VENV   ?= .venv-vllm
ENGINES_VENV ?= .venv-engines
CEPH        ?= .ceph
VLLM_NEXT   ?=
TEST_EXTRAS ?= test,transformers,gpu
TEST_WORKERS ?= auto
PYTEST_ARGS ?=
DEMO_ARGS   ?=
BENCH_ARGS  ?=
MUTANTS     ?= $(VENV)/mutants
MUTANTS_SIZE ?= 1000
MUTANTS_SEED ?= 1
MUTANTS_SECONDS ?= 3600

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
DOCS_STAMP := $(VENV)/.stamp-docs
MUTANTS_STAMP := $(VENV)/.stamp-mutants

.PHONY: help demo test test-slow test-vllm test-vllm-next test-engines test-remote mutants native native-check lint format docs \
    bench install clean

help:
	@echo "make demo     save a prompt's KV cache, load it in a new process (CPU is enough)"
	echo "make test     the tests to run before a commit (PYTEST_ARGS='-k name')"
	echo "make test-slow   the tests marked slow"
	echo "make test-vllm  the tests with a real vLLM (CPU build, 3.4 GB, in $(VLLM_VENV))"
	echo "make test-vllm-next  the connector's tests with the newest vLLM's Python over those kernels, in $(VLLM_VENV)-next"
	echo "make test-engines  the tests with a real SGLang and LMCache, and LightLLM from LIGHTLLM_SOURCE (on a CPU, in $(ENGINES_VENV))"
	echo "make test-remote  the tests of the bucket with Ceph's S3 gateway (Debian's packages, unpacked in $(CEPH))"
	echo "make mutants  judge a random sample of mutants for MUTANTS_SECONDS; call it again to go on"
	echo "make native   compile the native library into kvfs/native (a C compiler is needed)"
	echo "make native-check  the tests of native/ in C, under sanitizers"
	echo "make lint     ruff and mypy"
	echo "make format   let ruff rewrite the files"
	echo "make docs     the documentation as a site in build/site; fails on a link that leads nowhere"
	echo "make bench    tools/bench.py                  (BENCH_ARGS=...)"
	echo "make install  the environment for all of these, in $(VENV)"
	echo "make clean    remove $(VENV), $(VLLM_VENV), its -next, $(ENGINES_VENV), $(CEPH), caches and build outputs"

# The build backend is installed from the same pins, so that building the package asks the network for nothing.
$(BASE_STAMP): $(DEPS)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 10) <= v < (3, 15) else "kvfs needs Python 3.10 to 3.14; PYTHON=$(PYTHON) is %d.%d" % v[:2])'
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

$(DOCS_STAMP): $(BASE_STAMP)
	@echo "installing kvfs[docs] into $(VENV)"
	$(PIP) --no-build-isolation -e ".[docs]"
	touch "$@"

$(MUTANTS_STAMP): $(TEST_STAMP)
	@echo "installing kvfs[mutants] into $(VENV)"
	$(PIP) --no-build-isolation -e ".[mutants]"
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

# SGLang pins its own torch, too, and declares kernels for GPUs that no CPU has.
ENGINES_PIP   := "$(ENGINES_VENV)/bin/python" -m pip install -qq --disable-pip-version-check --no-input
ENGINES_STAMP := $(ENGINES_VENV)/.stamp
$(ENGINES_STAMP): pyproject.toml tests/sglang/requirements.txt tests/lmcache/requirements.txt tests/lightllm/requirements.txt
	@test -x "$(ENGINES_VENV)/bin/python" || $(PYTHON) -m venv "$(ENGINES_VENV)"
	echo "installing SGLang, LMCache and what LightLLM imports into $(ENGINES_VENV)"
	$(ENGINES_PIP) torch==2.13.0
	$(ENGINES_PIP) --no-deps -r tests/sglang/requirements.txt -r tests/lmcache/requirements.txt -r tests/lightllm/requirements.txt
	$(ENGINES_PIP) --no-deps --no-build-isolation -e .
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

# The newest release, so the environment is made again each time: no stamp. The tests of the connector's own code.
NEXT_TESTS := $(patsubst %,tests/vllm/test_%.py,settings internals scheduler worker layouts kinds families tier lookups)
test-vllm-next: $(VLLM_STAMP)
	@"$(VLLM_VENV)/bin/python" -m tools.vllm_overlay "$(VLLM_VENV)" "$(VLLM_VENV)-next" $(VLLM_NEXT)
	PYTHONPATH="$(CURDIR)" "$(VLLM_VENV)-next/bin/python" -m pytest $(NEXT_TESTS) --timeout 300 $(PYTEST_ARGS)

test-engines: $(ENGINES_STAMP) $(NATIVE_LIB)
	@"$(ENGINES_VENV)/bin/python" -m pytest tests/sglang tests/lmcache tests/lightllm tests/golden/test_golden_chain.py --timeout 300 $(PYTEST_ARGS)

# Unpacked, not installed: the system gets no service and no user of Ceph.
CEPH_STAMP := $(CEPH)/.stamp
$(CEPH_STAMP): tests/remote/debian.txt | $(TEST_STAMP)
	@echo "unpacking Ceph into $(CEPH)"
	$(PY) -m tools.ceph install "$(CEPH)"
	touch "$@"

test-remote: $(TEST_STAMP) $(NATIVE_LIB) $(CEPH_STAMP)
	@KVFS_CEPH="$(abspath $(CEPH))" $(PY) -m pytest tests/remote --timeout 300 $(PYTEST_ARGS)

# A long job in pieces: the session in $(MUTANTS) keeps what is done.
mutants: $(MUTANTS_STAMP) $(NATIVE_LIB)
	@test -e "$(MUTANTS)/session.sqlite" || $(PY) -m tools.mutants draw "$(MUTANTS)" --size $(MUTANTS_SIZE) --seed $(MUTANTS_SEED)
	nice -n 19 $(PY) -m tools.mutants run "$(MUTANTS)" --seconds $(MUTANTS_SECONDS)
	nice -n 19 $(PY) -m tools.mutants again "$(MUTANTS)" --seconds $(MUTANTS_SECONDS)
	$(PY) -m tools.mutants report "$(MUTANTS)" --survivors

lint: $(DEV_STAMP)
	@$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict kvfs

format: $(DEV_STAMP)
	@$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# A line of the theme about the future of MkDocs is no matter of these pages.
docs: $(DOCS_STAMP)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet -f .mkdocs.yml
	echo "built: build/site/index.html"

bench: $(DEMO_STAMP) $(NATIVE_LIB)
	@$(PY) tools/bench.py $(BENCH_ARGS)

clean:
	@if [ -e "$(ENGINES_STAMP)" ]; then rm -rf -- "$(ENGINES_VENV)"; fi
	if [ -e "$(CEPH_STAMP)" ]; then rm -rf -- "$(CEPH)"; fi
	if [ -e "$(BASE_STAMP)" ] || [ -e "$(VENV)/pyvenv.cfg" ]; then rm -rf -- "$(VENV)"; fi
	if [ -e "$(VLLM_STAMP)" ]; then rm -rf -- "$(VLLM_VENV)" "$(VLLM_VENV)-next"; fi
	rm -rf -- build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find kvfs tests tools -name __pycache__ -type d -prune -exec rm -rf -- {} +
