# make train     train the default config; STRATEGY=mirrored|multiworker|ps, ARGS='--train_steps=100'
# make test      the quick tests: most unit tests, a short run of each mode, a resume, a killed worker;
#                ARGS='tests/unit -k name' runs a part of them
# make test-all  all tests; ARGS='tests/faults', or ARGS='-m "not quick"' for what `make test` leaves out
# make lint      ruff (lint and format), import-linter and mypy
# make compat    tests/unit/compat with the newest TensorFlow and Keras, in build/compat-venv
# make docs      the site of the documentation, build/site/index.html
# make clean     remove what make has made; runs/ and datasets/ stay
#
# The first call makes $(VENV) with $(PYTHON), and a change of the requirements updates it. An environment
# that was not finished, or that has another version than the PYTHON of the command line, is made anew.
# Tests run two files at a time; TEST_PROCESSES=1 runs one. Files start in the order of their names, so the
# long ones (tests/cluster, tests/faults) come first, and no process is left with one at the end.

VENV ?= .venv
PYTHON ?= $(or $(and $(wildcard $(VENV)/.installed-*),$(wildcard $(VENV)/bin/python)),python3)
STRATEGY ?= mirrored
TEST_PROCESSES ?= 2
ARGS ?=

GET_VERSION = -c 'import sys; print("%d.%d" % sys.version_info[:2])'
VERSION := $(shell $(PYTHON) $(GET_VERSION))
HAS_VERSION = [ "`$(VENV)/bin/python $(GET_VERSION) 2>/dev/null`" = $(VERSION) ]
INSTALLED = $(VENV)/.installed-$(VERSION)

PYTEST = $(VENV)/bin/python -m pytest -n $(TEST_PROCESSES) --dist=loadfile --no-loadscope-reorder

COMPAT = build/compat-venv/bin/python
# The requirements of pyproject.toml, without their versions.
NEWEST = -c 'import re, tomllib; file = open("pyproject.toml", "rb"); \
    print(*(re.split("[<>=]", each)[0] for each in tomllib.load(file)["project"]["dependencies"]))'

.PHONY: train test test-all lint compat docs clean

train: $(INSTALLED)-train
	$(VENV)/bin/python -m trainer --strategy=$(STRATEGY) $(ARGS)

test: $(INSTALLED)-test
	$(PYTEST) -m quick $(ARGS)

test-all: $(INSTALLED)-test
	$(PYTEST) $(ARGS)

lint: $(INSTALLED)-dev
	$(VENV)/bin/python -m ruff check
	$(VENV)/bin/python -m ruff format --check
	$(VENV)/bin/lint-imports --no-logo --no-cache
	$(VENV)/bin/python -m mypy

compat:
	$(PYTHON) -m venv --clear build/compat-venv
	$(COMPAT) -m pip install --disable-pip-version-check --upgrade `$(COMPAT) $(NEWEST)` \
	    hypothesis pytest pytest-timeout scikit-learn
	$(COMPAT) -m pip install --disable-pip-version-check --no-deps --editable .
	$(COMPAT) -m pip freeze | grep -E '^(tensorflow|keras|numpy|protobuf)=='
	$(COMPAT) -m pytest tests/unit/compat $(ARGS)

docs: $(INSTALLED)-docs
	$(VENV)/bin/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `train` needs no extra. Only make writes .incomplete and .installed-*, so it removes nothing else.
$(INSTALLED)-%: pyproject.toml constraints.txt
	@case '$(VERSION)' in 3.11|3.12|3.13) ;; *) \
	    for found in python3.13 python3.12 python3.11; do $$found -c '' 2>/dev/null && break; done; \
	    echo "$(PYTHON) is $(if $(VERSION),Python $(VERSION),not a Python that starts);" \
	        "needed is 3.11, 3.12 or 3.13. With one of them installed, type:" \
	        "make $(MAKECMDGOALS) PYTHON=$$found" >&2; exit 2;; esac
	@if [ -e $(VENV)/.incomplete ] || { ls $(VENV)/.installed-* >/dev/null 2>&1 && ! $(HAS_VERSION); }; \
	    then rm -rf $(VENV); fi
	@rmdir $(VENV) 2>/dev/null; [ -e $(VENV) ] || { \
	    mkdir -p $(VENV) && touch $(VENV)/.incomplete && $(PYTHON) -m venv $(VENV); }
	@$(HAS_VERSION) || { echo "$(VENV) has another Python than $(VERSION), and make has not made it." \
	    "Type: make $(MAKECMDGOALS) VENV=.venv-$(VERSION)" >&2; exit 2; }
	$(VENV)/bin/python -m pip install --disable-pip-version-check \
	    --editable '.$(patsubst %,[%],$(filter-out train,$*))' --constraint constraints.txt
	@rm -f $(VENV)/.incomplete
	@touch $@
