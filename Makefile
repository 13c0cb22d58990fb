# Everything a newcomer or a CI machine needs: Python 3.11 or newer, make, and access to PyPI or a mirror.
#
#   make demo      train the tutorial CNN on MNIST and compare with plain Keras
#   make test      the fast tests        make test-all   all of them
#   make check     lint, format, types   make bench      the benchmarks
#   make docs      the documentation site, in site/
#   make wheel     the package, in dist/, for `pip install`
#   make test-versions   some of the tests with the oldest and the newest Keras and JAX that are supported
#   make mutate    put known mistakes into a copy of the code, and see whether the tests notice them

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Its models join the slow tests. It also asks for tensorflow-text, which brings a second TensorFlow that overwrites the
# files of tensorflow-cpu; the models need neither, so it is installed without what it asks for.
HUB := keras-hub==0.32.0

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-versions check docs docs-check wheel bench mutate clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

# pip is what a venv gets last, so a venv without it is an unfinished one.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"OpenIPU needs Python 3.11 or newer, {v[0]}.{v[1]} was found. Run: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv $(VENV)

# Two stamps, because the development tools bring PyTorch and TensorFlow, which a newcomer's first run does not need.
$(VENV)/.runtime: pyproject.toml | $(BIN)/pip
	@echo 'Installing OpenIPU with Keras and JAX into $(VENV), this takes a minute ...'
	@$(PIP) install --quiet --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/pip
	@echo 'Installing OpenIPU and its development tools into $(VENV), this takes a few minutes ...'
	@$(PIP) install --quiet --editable '.[dev]'
	@$(PIP) install --quiet --no-deps $(HUB)
	@touch $(VENV)/.runtime $@

setup: $(VENV)/.dev

demo: $(VENV)/.runtime
	@$(BIN)/openipu mnist

# By file, because the tests of a file share models and results.
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Without flags XLA optimizes as it does for users; see tests/conftest.py.
test-all: setup $(VENV)/.docs
	XLA_FLAGS= $(BIN)/python -m pytest -n 2 --dist loadfile -m ""

# Each combination has an environment of its own in .venvs/. Newer versions of JAX need a newer Python than 3.11.
test-versions:
	@$(PYTHON) tests/versions.py

wheel: | $(BIN)/pip
	@$(PIP) wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

$(VENV)/.docs: pyproject.toml $(VENV)/.runtime
	@echo 'Installing the tools for the documentation into $(VENV) ...'
	@$(PIP) install --quiet --editable '.[docs]'
	@touch $@

# Runs the tutorials, so that their pages show what they print.
docs: $(VENV)/.docs
	OPENIPU_RUN_TUTORIALS=true $(BIN)/mkdocs build --clean
	@echo 'The site is in site/: open site/index.html. Its search needs a server: python3 -m http.server --directory site'

# The same pages without running anything. Every broken link is an error.
docs-check: $(VENV)/.docs
	$(BIN)/mkdocs build --clean

bench: setup
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.summary
	$(BIN)/python -m benchmarks.first_step
	$(BIN)/python -m benchmarks.replicas
	$(BIN)/python -m benchmarks.instances
	$(BIN)/python -m benchmarks.pipelines
	$(BIN)/python -m benchmarks.plans
	$(BIN)/python -m benchmarks.checkpoints
	$(BIN)/python -m benchmarks.callbacks
	$(BIN)/python -m benchmarks.reports
	$(BIN)/python -m benchmarks.estimators
	$(BIN)/python -m benchmarks.tutorial
	$(BIN)/python -m benchmarks.scripts

# Slow, so not a part of what a change must pass. `python -m mutants --help` tells how to run some of them.
mutate: setup
	$(BIN)/python -m mutants --check --jobs 2

clean:
	rm -rf $(VENV) .venvs build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples mutants -name __pycache__ -type d -prune -exec rm -rf {} +
