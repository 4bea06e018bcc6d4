# Every target sets up what it needs: a fresh machine with Python (3.10 or newer) and make is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The kernels of a machine with a GPU are tested with whatever Python sees that GPU, since such machines often come
# with their own torch. PYTHONPATH finds the package where it is not installed.
HAS_CUDA = $(1) -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>/dev/null

.PHONY: help setup demo test lint gpu-test bench docs clean

help:
	@echo "make demo      learn with the loss, average series, draw output/demo.png"
	@echo "make test      the whole suite on the CPU"
	@echo "make lint      ruff and mypy"
	@echo "make gpu-test  the suite on an NVIDIA GPU"
	@echo "make bench     the benchmarks"
	@echo "make docs      the documentation, into site/"

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV) (the first time takes a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(STAMP)

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest -m "not gpu"

lint: $(STAMP)
	$(BIN)/ruff check .
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

clean:
	rm -rf output site .pytest_cache .mypy_cache .ruff_cache .hypothesis
