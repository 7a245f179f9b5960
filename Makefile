# `make demo` and `make test` work on a bare clone: they make .venv and install into it.

PYTHON ?= .venv/bin/python
TORCH := $(shell grep '^torch==' constraints.txt)
TRL_1_15 := .venv-trl-1.15/bin/python
PYTEST := $(PYTHON) -m pytest -n 2

.PHONY: demo demo-check demo-short test test-all test-part lint types bench bench-gpu clean

# torch goes first, by its pin: any other order may fetch another build of it
.venv/installed: pyproject.toml constraints.txt
	python3 -m venv .venv
	.venv/bin/python -m pip install --quiet $(TORCH)
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.venv/bin/python: .venv/installed

# The oldest supported TRL, with the oldest supported transformers
.venv-trl-1.15/installed: pyproject.toml constraints.txt
	python3 -m venv .venv-trl-1.15
	$(TRL_1_15) -m pip install --quiet $(TORCH)
	$(TRL_1_15) -m pip install --quiet $(TORCH) trl==1.15.0 transformers==5.17.0 --editable '.[dev]'
	touch $@

demo: $(PYTHON)
	$(PYTHON) examples/demo/run.py --seeds 0

demo-check: $(PYTHON)
	$(PYTHON) examples/demo/run.py --seeds 0 1 2

demo-short: $(PYTHON)
	$(PYTHON) examples/demo/run.py --short

# The fast tier
test: $(PYTHON)
	$(PYTEST) -m 'not slow'

# Every judged count, and the same losses on the oldest supported TRL
test-all: $(PYTHON) .venv-trl-1.15/installed
	TRL_EXT_OTHER_PYTHON=$(TRL_1_15) $(PYTEST)

# PART=2/8: the third eighth of what `make test` leaves out
test-part: $(PYTHON)
	$(PYTEST) -m slow --part $(PART)

lint: $(PYTHON)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: $(PYTHON)
	$(PYTHON) -m mypy

bench: $(PYTHON)
	$(PYTHON) benchmarks/head.py --device cpu --smoke

# On the GPU's own machine, with what is installed there: make bench-gpu PYTHON=python3
bench-gpu: $(PYTHON)
	$(PYTHON) benchmarks/head.py --device cuda

clean:
	rm -rf .venv .venv-trl-1.15 runs
