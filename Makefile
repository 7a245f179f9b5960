# `make demo` and `make test` work on a bare clone: they make .venv and install into it.

PYTHON ?= .venv/bin/python
TORCH := $(shell grep '^torch==' constraints.txt)
TRL_1_15 := .venv-trl-1.15/bin/python
PYTEST := $(PYTHON) -m pytest -n 2

.PHONY: demo demo-check demo-short test test-all test-part test-nightly lint types bench bench-training bench-passes bench-packing bench-scaling bench-gpu bench-report docs dist dist-check clean

# torch goes first, by its pin: any other order may fetch another build of it
.venv/installed: pyproject.toml constraints.txt
	@echo "Making .venv and installing into it; this takes some minutes"
	python3 -m venv .venv
	.venv/bin/python -m pip install --quiet $(TORCH)
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Another PYTHON is somebody else's environment: it is used as it is
VENV := $(if $(filter .venv/%,$(PYTHON)),.venv/installed)

# The oldest supported TRL, with the oldest supported transformers
.venv-trl-1.15/installed: pyproject.toml constraints.txt
	python3 -m venv .venv-trl-1.15
	$(TRL_1_15) -m pip install --quiet $(TORCH)
	$(TRL_1_15) -m pip install --quiet $(TORCH) trl==1.15.0 transformers==5.17.0 --editable '.[dev]'
	touch $@

demo: $(VENV)
	$(PYTHON) examples/demo/run.py --seeds 0

# Three seeds, then the control: with a learning rate of 0 nothing may be gained
demo-check: $(VENV)
	$(PYTHON) examples/demo/run.py --seeds 0 1 2
	$(PYTHON) examples/demo/run.py --learning-rate 0 --output runs/demo-control

demo-short: $(VENV)
	$(PYTHON) examples/demo/run.py --short

# The fast tier
test: $(VENV)
	$(PYTEST) -m 'not slow and not nightly'

# Every judged count, and the same losses on the oldest supported TRL
test-all: $(VENV) .venv-trl-1.15/installed
	TRL_EXT_OTHER_PYTHON=$(TRL_1_15) $(PYTEST) -m 'not nightly'

# PART=2/8: the third eighth of what `make test` leaves out
test-part: $(VENV)
	$(PYTEST) -m slow --part $(PART)

# The launch matrix on 3 and 4 processes
test-nightly: $(VENV)
	$(PYTHON) -m pytest -n 0 -m nightly

# The site, in site/; a warning is an error. In an environment of its own: it reads the package, and does not import it
.venv-docs/installed: pyproject.toml
	python3 -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet $$(.ci/extra docs)
	touch $@

docs: .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

# Wheel and sdist, in dist/
dist: $(VENV)
	rm -rf dist build
	$(PYTHON) -m build --outdir dist
	$(PYTHON) -m twine check --strict dist/*

# The wheel is made from the sdist, so that the sdist is whole; an environment that has only it trains a step, and its
# command looks at the machine. Compiling every file of torch and its like would take longer than all else
PIP_DIST := $(PYTHON) -m pip --python .venv-dist/bin/python install --quiet --no-compile
dist-check: dist
	rm -rf .venv-dist
	python3 -m venv --without-pip .venv-dist
	$(PIP_DIST) $(TORCH)
	$(PIP_DIST) --constraint constraints.txt dist/*.whl
	cd dist && ../.venv-dist/bin/python ../.ci/installed.py
	cd dist && ../.venv-dist/bin/trl-ext doctor

lint: $(VENV)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: $(VENV)
	$(PYTHON) -m mypy

bench: $(VENV)
	$(PYTHON) benchmarks/head.py --device cpu --results runs/bench
	$(PYTHON) benchmarks/training.py --smoke --results runs/bench
	$(PYTHON) benchmarks/passes.py --smoke --results runs/bench
	$(PYTHON) benchmarks/packing.py --smoke --results runs/bench
	$(PYTHON) benchmarks/scaling.py --smoke --results runs/bench
	$(PYTHON) benchmarks/store.py --smoke --results runs/bench

# Whole training steps and loss curves beside stock TRL's, on whatever device there is
bench-training: $(VENV)
	$(PYTHON) benchmarks/training.py

# Steps where passes or rows change no gradient
bench-passes: $(VENV)
	$(PYTHON) benchmarks/passes.py

# Full steps, the model without its head, and what packing costs where it saves nothing
bench-packing: $(VENV)
	$(PYTHON) benchmarks/packing.py

# Bytes that 2, 4 and 8 gloo ranks receive, beside the formulas and tables of docs/scaling.md
bench-scaling: $(VENV)
	$(PYTHON) benchmarks/scaling.py

# On the GPU's own machine, with what is installed there: make bench-gpu PYTHON=python3
# Of its 8 minutes the head has 200 s, whole steps 130 s, what packing costs where it saves nothing 20 s; what is left
# is for the tests and for four starts of Python. What does not fit is left out, with a line that says so. The passes
# that are left out are in whole steps already.
# Beside what the caller has there, such as wheels that were unpacked
bench-gpu: export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
bench-gpu: $(VENV)
	$(PYTHON) benchmarks/head.py --device cuda --budget 200
	$(PYTHON) benchmarks/training.py --budget 130
	$(PYTHON) benchmarks/packing.py --budget 20
	$(PYTHON) -m pytest -n 0 -q -m 'not slow' tests/test_hosted_reference_gpu.py tests/test_packing_gpu.py tests/test_kernels.py

# Tables and plots of docs/performance.md and the README's picture, from the lines in benchmarks/results/; the figures of
# the other pages, from formulas and counts
bench-report: $(VENV)
	$(PYTHON) benchmarks/report.py
	$(PYTHON) benchmarks/figures.py

clean:
	rm -rf .venv .venv-dist .venv-docs .venv-trl-1.15 build dist runs site
