# Every target sets up what it needs: a fresh machine with Python (3.10 or newer) and make is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The kernels of a machine with a GPU are tested with whatever Python sees that GPU, since such machines often come
# with their own torch. PYTHONPATH finds the package where it is not installed.
HAS_CUDA = $(1) -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>/dev/null

# How `make coverage` runs both suites.
PYTEST = $(BIN)/python -m pytest

.PHONY: help setup demo test test-slow coverage lint gpu-test bench docs docs-check clean

help:
	@echo "make demo      learn with the loss, average series, draw output/demo.png"
	@echo "make test      the quick suite on the CPU: every feature, a few minutes"
	@echo "make test-slow what the quick suite leaves out: every kernel, large problems, the examples"
	@echo "make coverage  both, and how much of the source they run"
	@echo "make lint      ruff and mypy"
	@echo "make gpu-test  the suite on an NVIDIA GPU"
	@echo "make bench     the benchmarks"
	@echo "make docs      the documentation, into site/"
	@echo "make docs-check  the same, looked at with headless Chromium (needs one; not part of .ci/run)"

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV) (the first time takes a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(STAMP)

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

test: $(STAMP)
	$(PYTEST) -m "not gpu and not slow"

test-slow: $(STAMP)
	$(PYTEST) -m "slow and not gpu"

# Child processes of tests are measured too: COVERAGE_FILE tells them where to write, wherever they run.
coverage: export COVERAGE_FILE = $(CURDIR)/.coverage
coverage: PYTEST = $(BIN)/coverage run -m pytest
coverage: $(STAMP)
	$(BIN)/coverage erase
	$(PYTEST) -m "not gpu and not slow"
	$(PYTEST) -m "slow and not gpu"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

gpu-test:
	@if $(call HAS_CUDA,$(PYTHON)); then python=$(PYTHON); \
	else $(MAKE) --no-print-directory setup && python=$(BIN)/python; fi; \
	PYTHONPATH=src $$python -m pytest -m gpu

bench:
	@if $(call HAS_CUDA,$(PYTHON)); then python=$(PYTHON); \
	else $(MAKE) --no-print-directory setup && python=$(BIN)/python || exit 1; fi; \
	$$python -m benchmarks $(ARGS)

docs: $(STAMP)
	@$(BIN)/python docs/figures.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Needs a Chromium or Chrome, which pip cannot bring; says so where there is none.
docs-check: docs
	@$(BIN)/python tools/check_docs.py

clean:
	rm -rf output site .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
