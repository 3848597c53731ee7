# Each target sets up what it needs in .venv, with python3.11 and the package registry alone.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
ALLOW_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help lab demo test check bench soak gpu clean

help:  ## Say what the targets do
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-8s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

lab: $(STAMP)  ## Open JupyterLab on the first lesson
	$(BIN)/jupyter lab $(ALLOW_ROOT) notebooks/01_first_comparison.ipynb

demo: $(STAMP)  ## Run the main comparison without a browser; writes build/demo
	$(BIN)/python -m ddpnb.notebook.demo build/demo

test: $(STAMP)  ## Run all tests
	$(BIN)/pytest

check: $(STAMP)  ## Lint, type check, and check that imports point one way
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)  ## Measure what benchmarks/README.md tells
	$(BIN)/python -m benchmarks

soak: $(STAMP)  ## Raise, kill and restart for ten minutes; see benchmarks/README.md
	$(BIN)/python -m benchmarks soak

gpu: $(STAMP)  ## Test and measure on GPUs; see benchmarks/README.md
	$(BIN)/pytest -m gpu
	$(BIN)/python -m benchmarks gpu

clean:  ## Remove what the targets made
	rm -rf $(VENV) build
