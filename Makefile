# Each target first installs its requirements into .venv. It needs only Python 3.11 or newer and a package registry.

IS_NEW = import sys; sys.exit(sys.version_info < (3, 11))
CANDIDATES := python3 python3.11 python3.12 python3.13 python3.14 python
PYTHON ?= $(shell for p in $(CANDIDATES); do if $$p -c '$(IS_NEW)' 2>/dev/null; then echo $$p; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
# Python compiles a module on its first import and stores the result, even if the caller forbids this. So pip need not compile.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := $(BIN)/pip install --quiet --no-compile --constraint constraints.txt
ALLOW_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)
TORCH := $(VENV)/.torch-installed
STAMP := $(VENV)/.installed
COMPAT := $(VENV)/.compat-installed
# Four test processes suit two cores, because most tests wait for other processes.
PARALLEL := -n 4 --no-loadscope-reorder
PYTEST := $(BIN)/pytest $(PARALLEL)
STACKS := colab hubs lowest
STACK_TESTS := tests/unit tests/kernel tests/faults tests/rank

.DEFAULT_GOAL := help
.PHONY: help lab demo docs student quick test compat portable coverage $(STACKS) mutants check dist bench bench-quick soak chaos gpu clean

help:  ## List the targets
	@sed 's/^$$(STACKS): %/$(STACKS)/' $(MAKEFILE_LIST) | grep -E '^[a-z ]+:.*##' | awk -F ':.*## ' '{printf "make %-8s %s\n", $$1, $$2}'

$(TORCH): constraints.txt
	@test -n "$(PYTHON)" || { echo "ddpnb needs Python 3.11 or newer, but PATH has no such Python. Run: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pip
	$(INSTALL) torch
	touch $@

$(STAMP): $(TORCH) pyproject.toml constraints.txt
	$(INSTALL) --editable '.[dev,lab]'
	touch $@

$(COMPAT): $(STAMP)
	$(INSTALL) --editable '.[dev,lab,compat]'
	touch $@

# build/NAME has the versions of tests/stacks/NAME.txt. With LINK_TORCH=1 it shares the torch of .venv instead.
build/%/.installed: tests/stacks/%.txt pyproject.toml $(if $(LINK_TORCH),$(TORCH))
	$(PYTHON) -m venv --clear build/$*
	$(if $(LINK_TORCH),ln -s $$(ls -d $(CURDIR)/$(VENV)/lib/python3*/site-packages/* | grep -E '/(torch|torchgen|functorch|(torch-|nvidia|triton)[^/]*)$$') build/$*/lib/python3*/site-packages)
	grep -v '^$(if $(LINK_TORCH),torch==,$$)' $< > build/$*/requirements.txt
	build/$*/bin/python -m pip install --quiet --constraint constraints.txt pip
	build/$*/bin/pip install --quiet --no-compile --requirement build/$*/requirements.txt --editable .
	touch $@

lab: $(STAMP)  ## Open the first lesson in JupyterLab
	$(BIN)/jupyter lab $(ALLOW_ROOT) --ServerApp.root_dir=$(CURDIR) --LabApp.default_url=/lab/tree/notebooks/01_first_comparison.ipynb

demo: $(STAMP)  ## Run the main comparison without a browser, and write build/demo
	$(BIN)/python -m ddpnb.demo build/demo

docs: $(STAMP)  ## Run the lessons and build the site in build/docs
	$(INSTALL) --editable '.[docs]'
	$(BIN)/sphinx-build -c docs -W --keep-going --quiet . build/docs

student: $(STAMP)  ## Write the students' notebooks from notebooks/solutions, without solutions and outputs
	$(INSTALL) --editable '.[course]'
	$(BIN)/jupyter nbconvert --config notebooks/solutions/student_config.py --to notebook --output-dir notebooks notebooks/solutions/*.ipynb

quick: $(STAMP)  ## Run the unit tests, without a cluster, in under a minute
	$(PYTEST) -n logical tests/unit

test: $(STAMP)  ## Run all tests, with real processes, kernels and a browser
	$(PYTEST) --junitxml=build/tests.xml

compat: $(COMPAT)  ## Test accelerate, Lightning, transformers and PyTorch's tutorials on the ranks
	$(BIN)/pytest tests/compat --junitxml=build/compat.xml

portable: $(STAMP)  ## Test the way that macOS needs, on Linux without the functions that macOS lacks
	$(BIN)/python tests/portable/gloo_abort.py
	PYTHONPATH=$(CURDIR)/tests/portable $(PYTEST) -n 2 tests/rank tests/faults tests/kernel

$(STACKS): %: build/%/.installed  ## Test with the versions of Colab, of hubs, or with the lowest (tests/stacks)
	build/$*/bin/pytest $(PARALLEL) $(STACK_TESTS)

coverage: $(STAMP)  ## Measure the lines that the unit, kernel, fault and rank tests run, in all processes
	$(PYTEST) --cov --cov-report=html:build/coverage $(STACK_TESTS)

mutants: $(STAMP)  ## Put 25 faults into a copy, one at a time, and check that a test catches each fault
	$(BIN)/python -m tests.mutants

check: $(STAMP)  ## Run the linter, the type checker, and the checks of imports and workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

dist: $(STAMP)  ## Build and check the wheel and the sdist in dist/
	rm -rf dist
	$(BIN)/hatchling build
	$(BIN)/twine check --strict dist/*

bench: $(STAMP)  ## Compare ddpnb with other tools (benchmarks/README.md)
	$(BIN)/python -m benchmarks versus

bench-quick: $(STAMP)
	$(BIN)/python -m benchmarks versus:quick=1

soak: $(STAMP)  ## Run errors, kills and restarts for ten minutes (benchmarks/README.md)
	$(BIN)/python -m benchmarks soak

chaos: $(STAMP)  ## Inject CASES=60 random faults, drawn from SEED=1, for about ten minutes
	$(BIN)/python -m tests.faults.chaos $(if $(SEED),--seed $(SEED)) $(if $(CASES),--cases $(CASES))

gpu: $(STAMP)  ## Test and measure on GPUs in MINUTES=14, and write build/gpu/report.json
	$(BIN)/python -m benchmarks.gpu_day $(if $(MINUTES),--minutes $(MINUTES))

clean:  ## Remove .venv, build and dist
	rm -rf $(VENV) build dist
