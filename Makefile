# make demo   the main job: two clusters of three devices learn through `flwr run . --stream`
# make test   the tests        make test-slow   the checks that take minutes
# make test-kernels  the tests with plain instead of vectorised CPU kernels, as on another processor
# make test-cluster  docs/deploy.md carried out on this machine: SuperLink, SuperNodes, devices, edge, failures
# make docs   the documentation site into site/, strictly: any warning fails
# make check  formatting, types, import contracts and tests: what a change must pass
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-kernels test-cluster test-slow docs check clean

demo: $(VENV)/.demo
	@$(BIN)/collapipe run . --federation-config sim.toml

test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not slow"

test-kernels: $(VENV)/.test
	ATEN_CPU_CAPABILITY=default $(BIN)/python -m pytest -m "not slow and not cluster"

test-cluster: $(VENV)/.test
	$(BIN)/python -m pytest -m cluster

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -m slow

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -m "not slow"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "CollaPipe needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@ $(VENV)/.demo

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,plot]'
	@touch $@ $(VENV)/.test $(VENV)/.demo

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache
