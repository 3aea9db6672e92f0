PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast test-gpu test-oldest lint bench bench-gpu docs docs-serve clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## Make .venv and install the package into it, with the pinned versions

# Install torch first and alone, so that the pin decides which build is installed. compileall uses
# all cores; pip would compile one file at a time. Files for other Python versions do not compile.
$(STAMP): pyproject.toml constraints.txt hatch_build.py $(wildcard src/rbn/ops/cpu/kernel*)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is required, e.g. make PYTHON=python3.11")'
	@echo "Installing into $(VENV); the first time takes a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[demo,train,sweep,dev,docs]'
	$(BIN)/python -m compileall -q -j 0 -x '/tests?/' $(VENV)/lib > /dev/null || true
	@touch $@

demo: install ## Run the demo (PERMUTED=1: on permuted pixels)
	$(BIN)/rbn demo $(if $(filter 1,$(PERMUTED)),--permuted)

# mypy uses one core for a minute, so the tests do not wait for it.
test: install ## Run the checks and all tests, with coverage
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & types=$$!; \
	$(BIN)/python -m pytest -n auto --dist worksteal --timeout=600 --durations=20 --cov=rbn --cov-fail-under=90; \
	tests=$$?; wait $$types && exit $$tests

test-fast: install ## Run one case of each kind of every test that is not slow, without lint and coverage
	$(BIN)/python -m pytest --fast -n auto --dist worksteal --timeout=600

test-gpu: ## Run the GPU tests with $(PYTHON) instead of .venv (MINUTES=4: time limit; LOG=FILE)
	PYTHONPATH=src $(PYTHON) benchmarks/gpu_tests.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(LOG),--log $(LOG))

# Without Triton: no version as old as that torch is available for every machine.
test-oldest: ## Run all tests with the oldest versions that pyproject.toml allows (PYTHON=python3.10)
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt torch
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e '.[demo,train,sweep,dev]'
	$(OLDEST)/bin/python -m pip uninstall --quiet --yes triton
	$(OLDEST)/bin/python -m pytest -n auto --dist worksteal --timeout=600

lint: install ## Run ruff check, ruff format --check and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install ## Time the layers on this CPU
	$(BIN)/python benchmarks/cpu.py

bench-gpu: ## Time the layers on this GPU with $(PYTHON) instead of .venv (MINUTES=5: time limit)
	PYTHONPATH=src $(PYTHON) benchmarks/gpu.py $(if $(MINUTES),--minutes $(MINUTES))

docs: install ## Build the documentation site into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: install ## Serve the documentation site locally, and rebuild it on changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --watch src/rbn

clean: ## Remove .venv, caches, builds and the demo's output (never runs/ or data/)
	rm -rf $(VENV) $(OLDEST) build dist demo-out htmlcov .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
