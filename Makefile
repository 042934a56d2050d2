# Two commands for a fresh machine: `make demo` and `make test`. Both need Python 3.11 to 3.13 and a package index.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-all test-every lint types rooms wrapped unit long docs docs-serve docs-links notebooks release-check format clean

demo: $(INSTALLED)
	$(BIN)/dlm-lens demo

test: lint types rooms wrapped unit

# The tests marked `long` too: kills, races, fuzzing, everything on a pretended GPU. And the site. What takes one core
# each runs side by side.
test-all: $(INSTALLED)
	$(MAKE) -j2 lint types rooms wrapped docs
	$(PYTEST) -m "long or not long"

# As test-all, with every case of the long tests that are run in turn (tests/turns.py): before a release.
test-every: export DLM_LENS_TURN = all
test-every: test-all

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

rooms: $(INSTALLED)
	$(BIN)/lint-imports

# In a folder of their own: installed beside the rest, torchao greets every command with warnings.
$(VENV)/.wrapping: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ \
		torchao optimum-quanto peft -c constraints.txt

wrapped: $(VENV)/.wrapping
	PYTHONPATH=$(VENV)/.wrapping $(BIN)/python -m pytest -q tests/adapters/test_quantisation.py \
		tests/attention/test_wrapped_models.py

unit: $(INSTALLED)
	$(PYTEST)

long: $(INSTALLED)
	$(PYTEST) -m long

# The site, in docs/_build/html: warnings are errors, internal links and names are checked, no network, no notebook runs.
docs: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -n -q -b html docs docs/_build/html
	@echo "the site is in docs/_build/html: make docs-serve"

docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory docs/_build/html 8000

# Executes docs/notebooks and stores their outputs; `python -m tests.notebooks tracing` one of them.
notebooks: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.notebooks

# The links to other sites; needs the network.
docs-links: $(INSTALLED)
	$(BIN)/python -m sphinx -b linkcheck -q docs docs/_build/linkcheck

# Wheel and sdist of the last commit, installed in clean environments with and without constraints.txt: many minutes.
release-check: $(INSTALLED)
	$(BIN)/python .ci/release_check.py

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) docs/_build docs/_pages

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else "dlm_lens needs Python 3.11 to 3.13, and $(PYTHON) is " + sys.version.split()[0] + "; give another: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $@
