# `make demo` and `make test` need nothing but Python >= 3.11, git and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# That of the virtual environment, if there is one.
VERSION := $(shell $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
# Exact versions for the Pythons that CI knows; a newer Python takes what the ranges of pyproject.toml allow.
CONSTRAINTS ?= $(wildcard constraints/py$(VERSION).txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(addprefix -c ,$(CONSTRAINTS))

# Tests start many processes: without stored bytecode, each process compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-gpu test-lab lint format bench docs constraints resolve notebooks release clean

demo: $(VENV)/.installed
	$(BIN)/python -m seqjax.main --config=configs/top1_chunk.py

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu"

# The tests of lab/, our runs and one-off scripts, which `make test` leaves out.
test-lab: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu" lab/tests

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow and not gpu"

test-gpu: $(VENV)/.installed-dev
	SEQJAX_TEST_GPU=1 $(BIN)/python -m pytest -m gpu

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.data --quick

# The pages and the API as HTML in build/docs; a warning is an error.
docs: $(VENV)/.installed-docs
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx --fail-on-warning --keep-going -b html docs build/docs

# The .ipynb halves, which Colab opens, from the .py halves, which people edit.
notebooks: $(VENV)/.installed-dev
	$(BIN)/jupytext --quiet --to ipynb --update colab/*.py

# Names and versions of what is installed now, for the constraints file of this Python.
constraints: $(VENV)/.installed-dev
	@{ echo '# What CI installs on Python $(VERSION); made by `make constraints`.'; \
	   $(BIN)/python -m pip list --format=freeze --exclude-editable | sed 's/+cpu$$//' | \
	     grep -vE '^(pip|wheel)=='; } > constraints/py$(VERSION).txt

# Whether pip finds versions for the ranges of pyproject.toml, each extra alone, without the constraints and within two
# minutes each. It installs nothing, but an old pip downloads what it looks at: make resolve EXTRAS="dev test-stores"
EXTRAS ?= $(shell $(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"])')
resolve: $(BIN)/python
	@for extra in $(EXTRAS); do \
	  echo "$$extra"; \
	  timeout 120 $(BIN)/python -m pip --disable-pip-version-check install --quiet --dry-run --ignore-installed \
	    -e ".[$$extra]" >/dev/null || { echo "[$$extra] does not resolve in two minutes: bound it in pyproject.toml"; exit 1; }; \
	done

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'seqjax needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...'; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) -e '.[test-all]'
	@touch $@ $(VENV)/.installed $(VENV)/.installed-docs

$(VENV)/.installed-docs: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) -e '.[docs]'
	@touch $@ $(VENV)/.installed

# The wheel from a clean clone in dist/, checked in new environments (docs/release.md).
release:
	PYTHON="$(PYTHON)" .ci/release

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
