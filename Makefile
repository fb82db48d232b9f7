# Everything a newcomer needs: `make run` and `make test`. Needs Python 3.11 or later, make, git and a package index.
PYTHON ?= python3
VENV := .venv
UV := $(VENV)/bin/uv
RUN := $(VENV)/bin
STAMP := $(VENV)/.synced
MSG ?=
# As it was typed: neither make nor the shell has a say in what is in it.
override MSG := $(value MSG)
export MSG
TESTS ?= tests

.DEFAULT_GOAL := help
.PHONY: help setup run test test-long check format bench mutants clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 12

$(UV):
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Perdure needs Python 3.11 or later; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9'

$(STAMP): $(UV) pyproject.toml uv.lock
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(UV) sync --quiet --locked --inexact
	@touch $@

setup: $(STAMP) ## make the virtual environment from the lock

run: $(STAMP) ## start everything embedded and chat; MSG="..." sends one message and exits
ifeq ($(strip $(MSG)),)
	$(RUN)/perdure run
else
	@$(RUN)/perdure run -- "$$MSG"
endif

test: $(STAMP) ## the whole suite
	$(RUN)/python -m pytest -n 2 --dist loadgroup -m "not long" $(TESTS)

test-long: $(STAMP) ## more seeds of the crash and race suites
	PERDURE_LONG=1 $(RUN)/python -m pytest -n 2 --dist loadgroup $(TESTS)

check: $(STAMP) ## format, lint, types, import contracts, tidy
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/basedpyright
	$(RUN)/lint-imports
	$(RUN)/python -m pytest tests/tidy

format: $(STAMP) ## rewrite the files in the house format
	$(RUN)/ruff format .
	$(RUN)/ruff check --fix .

mutants: $(STAMP) ## plant each known fault and see the suites catch it
	$(RUN)/python -m pytest tests/mutants

bench: $(STAMP) ## measure (ONLY=B2 for one); see docs/performance.md
	$(RUN)/python -m bench $(ONLY)

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
