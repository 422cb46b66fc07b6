# Two commands on a fresh machine with Python 3.11, pip and gcc:
#   make demo    watch a language model write faster than it can alone, the same text
#   make test    linters, types, layering and the whole test suite, on two cores (WORKERS=N for others)
# And, with a network: make docs builds these pages and the API reference as a site in build/docs.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test setup lint docs clean

demo: setup
	@$(BIN)/draftproof demo

test: setup lint
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

lint: setup
	@$(BIN)/ruff check src tests recipes examples
	@$(BIN)/mypy

docs: setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (once; one to two minutes)..."
	@$(PYTHON) -c 'import sys; sys.exit("draftproof needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
