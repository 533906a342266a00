# Every target works from a fresh clone: the first one called makes .venv and installs into it.
#
#   make TARGET TORCH=2.15.0   with another supported torch (constraints/ lists them)
#   make test ARGS="..."       more arguments for pytest; JOBS=1 for one process

PYTHON ?= python3
TORCH ?= 2.13.0
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
ARGS ?=

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

RUN := .venv/bin/python
# Tests see no cache of an earlier run, and an error inside the plugin is an error.
PYTEST = cache=$$(mktemp -d) && trap 'rm -rf "$$cache"' EXIT && INDUCTOR_EXT_STRICT=1 \
	TORCHINDUCTOR_CACHE_DIR=$$cache/inductor $(RUN) -m pytest

.PHONY: help demo test lint format goldens bench venv clean

help:  ## what can be made
	@sed -n 's/^\([a-z]*\):.*## /make \1\t/p' Makefile | expand -t 16

venv:  ## only the virtual environment (.venv); does nothing where it is up to date
	@PYTHON="$(PYTHON)" .ci/venv .venv dev $(TORCH)

demo: venv  ## the plugin at work: on the card if there is one, else for a virtual H200
	@$(RUN) -m inductor_ext demo

test: venv  ## all tests that need no card
	@$(PYTEST) -n $(JOBS) $(ARGS)

lint: venv  ## format, lint rules and types, changing nothing
	@failed=0; for tool in "ruff format --check" "ruff check" "mypy"; do \
		$(RUN) -m $$tool || failed=1; done; exit $$failed

format: venv  ## put files into the format, mend what the linter can
	@$(RUN) -m ruff check --fix-only -q
	@$(RUN) -m ruff format

goldens: venv  ## rewrite the expected code in the tests: read the diff before committing it
	@EXPECTTEST_ACCEPT=1; export EXPECTTEST_ACCEPT; $(PYTEST) -m codegen $(ARGS)

bench: venv  ## every benchmark, writing benchmarks/results; needs a card
	@$(RUN) -m pip install -qq --retries 1 --no-build-isolation -e '.[bench]' || \
		echo "going on without the peers that could not be installed" >&2
	@$(RUN) -m inductor_ext bench $(ARGS)

clean:  ## remove the virtual environment and what builds and tools leave behind
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
