# Needs Python 3.11 or newer, make and git. Everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint types format protos chart clean

help: ## Show these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## Install Headrace and its tools into .venv; instant when nothing changed

demo: $(INSTALLED) ## Start a cluster on this machine, stream answers from it, show what moved
	@$(BIN)/headrace demo

test: $(INSTALLED) ## Run all tests
	@$(BIN)/python -m pytest

check: lint types ## Format, lint, types, import contracts, protos; writes nothing

lint: $(INSTALLED) ## Everything in check but the types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/buf lint
	@$(BIN)/buf format --diff --exit-code
	@$(BIN)/python tools/generate_protos.py --check
	@$(BIN)/python tools/generate_chart.py --check

types: $(INSTALLED) ## Check the types
	@$(BIN)/basedpyright

format: $(INSTALLED) ## Format, and fix what can be fixed
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .
	@$(BIN)/buf format --write

protos: $(INSTALLED) ## Generate the stubs in headrace/rpc from proto/
	@$(BIN)/python tools/generate_protos.py

chart: $(INSTALLED) ## Generate the values of deploy/helm from tools/chart_values.py and the settings
	@$(BIN)/python tools/generate_chart.py

clean: ## Remove .venv, caches and build output
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an install that was cut short is taken up again.
$(INSTALLED): pyproject.toml constraints.txt $(wildcard headrace/engine/native/src/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Headrace needs Python 3.11 or newer; '$(PYTHON)' is not. Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Installing into .venv: about 2.5 GB, a minute or more"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@
