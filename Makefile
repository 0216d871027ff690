# make train     train the default config; STRATEGY=mirrored|multiworker|ps, ARGS='--train_steps=100'
# make test      the quick tests: all unit tests, a short run of each mode, a resume, a killed worker;
#                ARGS='tests/unit -k name' runs a part of them
# make test-all  all tests; ARGS='tests/faults', or ARGS='-m "not quick"' for what `make test` leaves out
# make lint      ruff (lint and format) and mypy
# make docs      the site of the documentation, build/site/index.html
# make clean     remove what make has made; runs/ and datasets/ stay
#
# The first call makes $(VENV) with $(PYTHON), 3.11 to 3.13, and a change of the requirements updates it.
# Tests run two files at a time; TEST_PROCESSES=1 runs one. Files start in the order of their names, so the
# long ones (tests/cluster, tests/faults) come first, and no process is left with one at the end.

PYTHON ?= python3
VENV ?= .venv
STRATEGY ?= mirrored
TEST_PROCESSES ?= 2
ARGS ?=

PYTEST = $(VENV)/bin/python -m pytest -n $(TEST_PROCESSES) --dist=loadfile --no-loadscope-reorder

.PHONY: train test test-all lint docs clean

train: $(VENV)/.installed-test
	$(VENV)/bin/python -m trainer --strategy=$(STRATEGY) $(ARGS)

test: $(VENV)/.installed-test
	$(PYTEST) -m quick $(ARGS)

test-all: $(VENV)/.installed-test
	$(PYTEST) $(ARGS)

lint: $(VENV)/.installed-dev
	$(VENV)/bin/python -m ruff check
	$(VENV)/bin/python -m ruff format --check
	$(VENV)/bin/python -m mypy

docs: $(VENV)/.installed-docs
	$(VENV)/bin/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed-%: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check --editable '.[$*]' --constraint constraints.txt
	touch $@
