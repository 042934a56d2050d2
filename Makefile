# Two commands for a fresh machine: `make demo` and `make test`. Both need Python 3.11 to 3.13 and a package index.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-all lint types rooms quantised unit long format clean

demo: $(INSTALLED)
	$(BIN)/dlm-lens demo

test: lint types rooms quantised unit

# The tests marked `long` too: kills, races, fuzzing, everything on a pretended GPU.
test-all: test long

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

rooms: $(INSTALLED)
	$(BIN)/lint-imports

# torchao in a folder of its own: installed beside the rest, it greets every command with warnings.
$(VENV)/.torchao: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ torchao -c constraints.txt

quantised: $(VENV)/.torchao
	PYTHONPATH=$(VENV)/.torchao $(BIN)/python -m pytest -q tests/adapters/test_quantisation.py

unit: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist loadfile

long: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist loadfile -m long

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else "dlm_lens needs Python 3.11 to 3.13, and $(PYTHON) is " + sys.version.split()[0] + "; give another: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $@
