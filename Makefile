# The commands of a working copy. `make serve` and `make test` are each enough on a fresh clone: they set up .venv first.
# Needs Python 3.10 or later, pip, make and a C++ compiler; the native library is built where an nvcc is found.

# The first interpreter that runs and is recent enough; 3.11 is tried first because most wheels exist for it.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3.10 python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
# One release, so that the tests and their tolerances mean the same on every machine. Albatross itself takes 2.10 and later:
# `make serve TORCH=torch` takes the newest.
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

BUILD_INPUTS := pyproject.toml setup.py CMakeLists.txt $(shell find csrc python/albatross/build -type f -not -name "*.pyc")
INSTALLED := $(VENV)/.installed
INSTALLED_TEST := $(VENV)/.installed-test

.DEFAULT_GOAL := help
.PHONY: help serve test lint format wheel gpu-test bench docs clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(INSTALLED) ## Serve the demo model at 127.0.0.1:8000 (ARGS="my.pth --port 9000" to change that)
	$(BIN)/albatross serve $(ARGS)

test: $(INSTALLED_TEST) ## Run the tests that need no GPU (ARGS="-k scheduler" to choose)
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

lint: $(INSTALLED_TEST) ## Check style and types
	$(BIN)/ruff check .
	mkdir -p build/links && ln -sfn ../../server build/links/albatross_server
	$(BIN)/mypy

format: $(INSTALLED_TEST) ## Mend what ruff can mend by itself
	$(BIN)/ruff check --fix .

wheel: $(INSTALLED_TEST) ## Build the wheel into dist/
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/python -m build --wheel

gpu-test: $(INSTALLED_TEST) ## Run the GPU tests and benchmarks; needs a CUDA card
	PYTHON=$(BIN)/python bash ci/gpu_check.sh $(ARGS)

bench: $(INSTALLED_TEST) ## Measure the server and the engine on this machine (ARGS are passed on)
	$(BIN)/python -m bench.serve $(ARGS)

docs: $(INSTALLED_TEST) ## Write the pages that are made from the code and the results
	$(BIN)/python tools/generate_docs.py
	$(BIN)/python -m bench.pages

clean: ## Remove what was built, but keep .venv
	rm -rf build dist *.egg-info python/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find bench ci python server tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Remove .venv too
	rm -rf $(VENV)

$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "Albatross needs Python 3.10 or later; none was found. Say where it is: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch comes first and by itself, so that the native library's build finds its headers in the environment.
$(INSTALLED): $(BIN)/pip $(BUILD_INPUTS)
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(INSTALLED_TEST): $(BIN)/pip $(BUILD_INPUTS)
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $(INSTALLED) $@
