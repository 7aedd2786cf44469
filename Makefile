# make setup | check | test | full | demo | lint | bench | chaos      extra flags: make demo ARGS="--train.seed 1"
PYTHON := .venv/bin/python
ARGS ?=
# Two processes of pytest, each with a Ray session of its own; a file's tests stay together, and share its runs.
PYTEST := $(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: setup demo lint check test full bench chaos

setup:
	@scripts/setup.sh

demo: setup
	.venv/bin/molt demo $(ARGS)

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/basedpyright --level error

# After every edit: what starts no cluster and no engine.
check: lint
	$(PYTEST) -m "not ray and not vllm and not processes and not full" $(ARGS)

# What continuous integration runs.
test: lint
	$(PYTEST) -m "not full" $(ARGS)

# Before a release: learning curves, random kills, harnesses too.
full: lint
	$(PYTEST) $(ARGS)

# One after another: they measure, so they must not share the cores.
bench: setup
	@set -e; for file in benchmarks/[a-z]*.py; do echo "== $$file"; $(PYTHON) $$file $(ARGS); done

# Kills everything that can die, at random moments; 10 schedules with the fake engine, 3 with vLLM.
chaos: setup
	$(PYTHON) -m tests.chaos $(ARGS)
