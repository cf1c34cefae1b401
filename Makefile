# make serve   set everything up and serve the bundled family on http://127.0.0.1:8000
# make test    set everything up and run the tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8000
# Tests of one file stay together; every worker has a core of its own (tests/conftest.py).
PARALLEL ?= -n auto --maxprocesses 4 --dist loadfile

.PHONY: setup serve test test-slow check format docs clean

setup: $(VENV)/.ready

# torch comes first and alone: on a machine without a GPU, an unpinned torch that another package
# pulls in brings gigabytes of CUDA along.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[serve,plot,docs,dev]'
	touch $@

serve: setup
	$(BIN)/penstock serve --port $(PORT)

test: setup
	$(BIN)/python -m pytest -m "not slow and not gpu" $(PARALLEL)

test-slow: setup
	$(BIN)/python -m pytest -m "slow and not gpu"

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
