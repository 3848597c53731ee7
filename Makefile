# Each target first installs its requirements into .venv. It needs only Python 3.11 or newer and a package registry.

IS_NEW = import sys; sys.exit(sys.version_info < (3, 11))
CANDIDATES := python3 python3.11 python3.12 python3.13 python3.14 python
PYTHON ?= $(shell for p in $(CANDIDATES); do if $$p -c '$(IS_NEW)' 2>/dev/null; then echo $$p; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
ALLOW_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)
STAMP := $(VENV)/.installed
COMPAT := $(VENV)/.compat-installed
# Four test processes suit two cores, because most tests wait for other processes.
PYTEST := $(BIN)/pytest -n 4 --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help lab demo docs student quick test compat mutants check bench bench-quick soak gpu clean

help:  ## List the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-8s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "ddpnb needs Python 3.11 or newer, but PATH has no such Python. Run: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,lab]'
	touch $@

$(COMPAT): $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,lab,compat]'
	touch $@

lab: $(STAMP)  ## Open the first lesson in JupyterLab
	$(BIN)/jupyter lab $(ALLOW_ROOT) --ServerApp.root_dir=$(CURDIR) --LabApp.default_url=/lab/tree/notebooks/01_first_comparison.ipynb

demo: $(STAMP)  ## Run the main comparison without a browser, and write build/demo
	$(BIN)/python -m ddpnb.demo build/demo

docs: $(STAMP)  ## Run the lessons and build the site in build/docs
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/sphinx-build -c docs -W --keep-going --quiet . build/docs

student: $(STAMP)  ## Write the students' notebooks from notebooks/solutions, without solutions and outputs
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[course]'
	$(BIN)/jupyter nbconvert --config notebooks/solutions/student_config.py --to notebook --output-dir notebooks notebooks/solutions/*.ipynb

quick: $(STAMP)  ## Run the unit tests, without a cluster, in under a minute
	$(PYTEST) -n logical tests/unit

test: $(STAMP)  ## Run all tests, with real processes, kernels and a browser
	$(PYTEST) --junitxml=build/tests.xml

compat: $(COMPAT)  ## Test accelerate, Lightning, transformers and PyTorch's tutorials on the ranks
	$(BIN)/pytest tests/compat --junitxml=build/compat.xml

mutants: $(STAMP)  ## Put 25 faults into a copy, one at a time, and check that a test catches each fault
	$(BIN)/python -m tests.mutants

check: $(STAMP)  ## Run the linter, the type checker and the checks of the import order
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)  ## Compare ddpnb with other tools (benchmarks/README.md)
	$(BIN)/python -m benchmarks versus

bench-quick: $(STAMP)
	$(BIN)/python -m benchmarks versus:quick=1

soak: $(STAMP)  ## Run errors, kills and restarts for ten minutes (benchmarks/README.md)
	$(BIN)/python -m benchmarks soak

gpu: $(STAMP)  ## Test and measure on GPUs, and write build/gpu/report.html
	$(BIN)/python -m benchmarks.gpu_day

clean:  ## Remove .venv and build
	rm -rf $(VENV) build
