# make setup | demo | test | lint | bench | chaos      extra flags: make demo ARGS="--train.seed 1"
PYTHON := .venv/bin/python
ARGS ?=

.PHONY: setup demo test lint bench chaos

setup:
	@scripts/setup.sh

demo: setup
	.venv/bin/molt demo $(ARGS)

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

test: lint
	$(PYTHON) -m pytest $(ARGS)

# One after another: they measure, so they must not share the cores.
bench: setup
	@set -e; for file in benchmarks/[a-z]*.py; do echo "== $$file"; $(PYTHON) $$file $(ARGS); done

# Kills everything that can die, at random moments; 10 schedules with the fake engine, 3 with vLLM.
chaos: setup
	$(PYTHON) -m tests.chaos $(ARGS)
