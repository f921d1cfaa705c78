# `make demo` and `make test` each do all the set-up that a fresh machine needs, then their job.
PYTHON ?= python3
ENGINE ?= auto
PROFILE ?= smollm2-135m
BIN = .venv/bin

.PHONY: demo test setup lint clean
.DEFAULT_GOAL := demo

setup:
	@$(PYTHON) scripts/bootstrap.py --engine $(ENGINE)

demo: setup
	@$(BIN)/tideline demo --profile $(PROFILE) $(ARGS)

test: setup
	@$(BIN)/python -m pytest $(ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/check_migrations.py

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
