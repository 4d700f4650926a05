# `make verify` and `make test` set up .venv by themselves; a second run installs nothing.

PYTHON ?= python3
LOCKS  := requirements/cpu.txt requirements/docs.txt
STAMP  := .venv/.setup-$(shell cat $(LOCKS) pyproject.toml | sha256sum | cut -c1-16)
BIN    := .venv/bin
# These look at their own process's memory, so they get a process in which nothing else has run.
MEMORY := $(addprefix tests/unit/test_,cache.py cache_machine.py driver_host.py tensor.py vmm.py)
OTHERS := tests $(addprefix --ignore=,$(MEMORY))

.DEFAULT_GOAL := help
.PHONY: help setup check test test-extras test-faults test-fuzz test-kit test-pairs test-soak verify bench docs clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(STAMP) ## Make .venv with the locked requirements and kvx itself

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "kvx needs Python 3.11 or newer; set PYTHON")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(LOCKS:%=-r %)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@scripts/system_libraries.sh
	@rm -f .venv/.setup-*
	@touch $@

check: setup ## Format, lint, types, layers, fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q -m "not gpu" $(MEMORY)
	$(BIN)/python -m pytest -q -m "not vllm and not slow and not gpu and not faults and not soak and not fuzz" $(OTHERS)

test: setup ## Everything that runs on this machine, real vLLM engines included
	$(BIN)/python -m pytest -q -m "not gpu" $(MEMORY)
	$(BIN)/python -m pytest -q -m "not gpu and not matrix and not pairs and not soak and not fuzz and (quick or not faults)" $(OTHERS)

test-kit: setup ## All of the conformance kit, its table to build/kit.json; then matrix rows that `make test` leaves out
	mkdir -p build
	$(BIN)/python -m pytest -q -m "not gpu" --kvx-kit-json build/kit.json tests/kit
	$(BIN)/python -m pytest -q -m "matrix and not gpu" tests --ignore=tests/kit

test-pairs: setup ## Pairs of real engines that differ in ranks and block sizes, and unusual models
	$(BIN)/python -m pytest -q -m "pairs and not gpu" tests

test-faults: setup ## The table of faults, to build/faults.json, and what engines leave behind: needs root, and `ip` of iproute2
	mkdir -p build
	$(BIN)/python -m pytest -q -m faults --kvx-faults-json build/faults.json tests/faults tests/vllm

test-extras: setup ## Each extra of the wheel in an empty environment, used from an empty folder: downloads some GB
	$(BIN)/python scripts/try_extras.py

test-soak: setup ## 10,000 hand-offs with aborts and kills over each connector, to build/soak.json: some minutes
	mkdir -p build
	$(BIN)/python -m pytest -q -m soak --kvx-soak-json build/soak.json tests/soak

test-fuzz: setup ## A million mutated messages and thousands of mixed-up hand-offs, to build/fuzz.json
	$(BIN)/python -m pytest -q -m "fuzz and not gpu" tests
	$(BIN)/python -W ignore tests/fuzz/run_fuzz.py

verify: setup ## Eight questions on one stock server and on a kvx pair: all must be identical
	$(BIN)/kvx verify --limit 8

bench: setup ## Time a kvx pair beside a stock NixlConnector pair
	$(BIN)/kvx bench pd

docs: setup ## The documentation as a site, in build/site; every link is checked
	$(BIN)/python scripts/cli_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean: ## Remove the environment and every cache
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
