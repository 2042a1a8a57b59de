PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet

.PHONY: help setup demo test test-torch-only bench lint format clean

help:
	@echo "make demo   train HKT and standard attention on ListOps and compare them"
	@echo "make test   run all the tests"
	@echo "make bench  speed and memory, best with nothing else running"
	@echo "make lint   ruff, mypy and the arrows of ARCHITECTURE.md"
	@echo "make format let ruff rewrite the code"
	@echo "make clean  remove what the commands above made"

setup: $(STAMP)

# torch goes first and by pin, so that no other package chooses its build.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "Creating $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@echo "Installing (a few minutes the first time) ..."
	@$(PIP_INSTALL) -c constraints.txt torch==2.13.0
	@$(PIP_INSTALL) -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(STAMP)
	$(BIN)/polyscale demo --output runs/demo

test: $(STAMP) test-torch-only
	$(BIN)/python -m pytest -n auto --dist worksteal

# The package in a second environment that has torch and nothing else.
test-torch-only: $(STAMP)
	$(BIN)/python -m venv --clear $(VENV)/torch-only
	$(VENV)/torch-only/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt torch==2.13.0
	$(VENV)/torch-only/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt .
	cd tests && ../$(VENV)/torch-only/bin/python torch_only.py

bench: $(STAMP)
	$(PIP_INSTALL) -c constraints.txt -e ".[bench]"
	$(BIN)/polyscale bench hkt --output benchmarks/results
	$(BIN)/polyscale bench hsa --output benchmarks/results
	$(BIN)/polyscale bench levels --output benchmarks/results

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
