# make train     train the default config; STRATEGY=mirrored|multiworker|ps, ARGS='--train_steps=100'
# make test      run the whole test suite; ARGS='tests/unit -k name' runs a part of it,
#                ARGS='-n2 --dist=loadfile' two files at a time
# make lint      ruff (lint and format) and mypy
# make clean     remove what make has made; runs/ and datasets/ stay
#
# The first call makes $(VENV) with $(PYTHON), 3.11 to 3.13; a change of what is needed updates it.

PYTHON ?= python3
VENV ?= .venv
STRATEGY ?= mirrored
ARGS ?=

.PHONY: train test lint clean

train: $(VENV)/.installed-test
	$(VENV)/bin/python -m trainer --strategy=$(STRATEGY) $(ARGS)

test: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest $(ARGS)

lint: $(VENV)/.installed-dev
	$(VENV)/bin/python -m ruff check
	$(VENV)/bin/python -m ruff format --check
	$(VENV)/bin/python -m mypy

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed-%: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check --editable '.[$*]' --constraint constraints.txt
	touch $@
