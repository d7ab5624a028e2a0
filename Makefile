# `make demo` and `make test` only need Python >= 3.11, git and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Python version of the virtual environment if it exists, otherwise of PYTHON.
VERSION := $(shell $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
# Exact package versions for the tested Pythons. A newer Python uses the ranges in pyproject.toml.
CONSTRAINTS ?= $(wildcard constraints/py$(VERSION).txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(addprefix -c ,$(CONSTRAINTS))

# Tests start many processes: without stored bytecode, each process compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-gpu test-lab lint format bench docs constraints resolve notebooks release clean

demo: $(VENV)/.installed
	$(BIN)/python -m seqjax.main --config=configs/top1_chunk.py

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu"

# Tests of lab/, which `make test` leaves out.
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

# Pages and API as HTML in build/docs; warnings are errors.
docs: $(VENV)/.installed-docs
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx --fail-on-warning --keep-going -b html docs build/docs

# Write the .ipynb notebooks for Colab from the edited .py files.
notebooks: $(VENV)/.installed-dev
	$(BIN)/jupytext --quiet --to ipynb --update colab/*.py

# Write the installed versions to the constraints file of this Python.
constraints: $(VENV)/.installed-dev
	@{ echo '# What CI installs on Python $(VERSION); made by `make constraints`.'; \
	   $(BIN)/python -m pip list --format=freeze --exclude-editable | sed 's/+cpu$$//' | \
	     grep -vE '^(pip|wheel)=='; } > constraints/py$(VERSION).txt

# Check that pip resolves each extra of pyproject.toml within two minutes, without constraints. Nothing is installed, but
# an old pip downloads the candidates. For some extras only: make resolve EXTRAS="dev test-stores"
EXTRAS ?= $(shell $(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"])')
resolve: $(BIN)/python
	@for extra in $(EXTRAS); do \
	  echo "$$extra"; \
	  timeout 120 $(BIN)/python -m pip --disable-pip-version-check install --quiet --dry-run --ignore-installed \
	    -e ".[$$extra]" >/dev/null || { echo "[$$extra] does not resolve in two minutes: bound it in pyproject.toml"; exit 1; }; \
	done

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'seqjax needs Python 3.11 or newer. Select it with make PYTHON=python3.12 ...'; exit 1; }
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

# Build the wheel in a clean clone, check it in new environments, and copy it to dist/ (docs/release.md).
release:
	PYTHON="$(PYTHON)" .ci/release

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
