# `make demo` and `make test` do all their own set-up in .venv and say what is missing. `make help` lists the rest.
#
#   PYTHON=/path/to/python3   use this interpreter          CXX=clang++     use this compiler
#   VENV=.venv-x              another environment           PYTEST_ARGS=-x  handed to pytest
#   JOBS=2                    pytest processes             SEEDS=100       schedules of the emulator, for each kernel
#   GPU_CHECK_ARGS="--stages soak"                         handed to scripts/gpu_check.sh

SHELL       := /bin/bash
VENV        ?= .venv
PY          := $(VENV)/bin/python
PYTEST_ARGS ?=
JOBS        ?= auto
SEEDS       ?= 20
# Objects of the CPU library: the extension, its wheels and the C++ tests share them.
export KERNEL_OBJECTS ?= $(CURDIR)/build/kernels
GPU_CHECK_ARGS ?=
TRUST_ARGS  ?=
ifeq ($(origin CXX),default)
CXX         := $(firstword $(foreach c,c++ g++ clang++,$(shell command -v $(c) 2>/dev/null)) c++)
endif
CORES       := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
SOURCES     := $(shell find $(wildcard cpu cuda) -name '*.h' -o -name '*.cc' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu')
# What the extensions are built from. Device headers and the emulator are not: kernels are compiled from them when they are needed.
NATIVE      := $(shell find cpu/src cpu/include cuda/src -type f 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-python fuzz-schedules trust lint format docs bench table kernel-table kernel-counts gpu-check gpu-prepare wheels clean
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.examples ## fit a photograph with a coordinate network (about two minutes)
	$(PY) examples/fit_image.py

test: $(VENV)/.examples ## the C++ tests, then the fast Python tests
	@$(MAKE) --no-print-directory -j$(CORES) cpu-test
	@$(MAKE) --no-print-directory test-python

# A worker takes whole files, so that what the tests of a file share is made once. (Groups of tests would not hold: pytest 9.2 took away
# what pytest-xdist 3.8 writes them into, and says nothing.) What XLA compiles around the calls is compiled without LLVM's
# optimisations, a seventh of the processor's time; with them it is compiled in `make test-slow`, in the smoke tests of .ci/run and by
# a plain pytest. Bytecode is written whatever the shell says: a process of a test that finds none takes 1.6 CPU-seconds, not 1.2.
test-python: export XLA_FLAGS += --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true
test-python: $(VENV)/.examples $(VENV)/.nvrtc-13.0
	env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=15 --durations-min=5 -m "not slow and not gpu" $(PYTEST_ARGS)

test-slow: $(VENV)/.examples $(VENV)/.nvrtc-13.0 ## the exhaustive matrices
	$(PY) -m pytest -n $(JOBS) -m "slow and not gpu" $(PYTEST_ARGS)

fuzz-schedules: $(VENV)/.examples ## CUDA kernels in the emulator under SEEDS schedules each
	$(PY) -m tests.support.cuda_run $(SEEDS)

trust: $(VENV)/.examples ## random programs against NumPy: TRUST_ARGS="--programs 10000 --seed 1 --budget 7200", or "--jax-tests FOLDER"; failures into out/trust
	$(PY) -m trust --jobs $(CORES) $(TRUST_ARGS)

lint: $(VENV)/.lint ## formatter, linter and type checker; changes nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy kitsune_jax benchmarks examples scripts trust reference kernel_checks
	$(VENV)/bin/clang-format --dry-run --Werror $(SOURCES)

format: $(VENV)/.lint ## format Python and C++ in place
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(SOURCES)

docs: $(VENV)/.docs ## the site, into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

bench: $(VENV)/.examples ## measure every case of the README's tables (half an hour) and write them
	$(PY) -m benchmarks run --all
	$(PY) -m benchmarks run --all --mode train
	$(PY) -m benchmarks grid
	$(PY) scripts/update_readme.py

table: $(VENV)/.examples ## write the README's generated parts from what is stored
	$(PY) scripts/update_readme.py

kernel-table: $(VENV)/.examples $(VENV)/.nvrtc-13.0 ## compile every kind of CUDA kernel (ten minutes, no GPU) and write the table of docs/kernels.md
	$(PY) scripts/kernel_table.py --other $(VENV)/nvrtc-13.0
	$(PY) scripts/planned_table.py

kernel-counts: $(VENV)/.examples ## count what every kind of CUDA kernel does in the emulator (five minutes, no GPU), for docs/kernels.md and docs/offchip.md
	$(PY) scripts/kernel_counts.py

gpu-check: $(VENV)/.gpu ## on a machine with a GPU: correctness, applications timed, into out/gpu-check (seven minutes)
	PYTHON=$(PY) scripts/gpu_check.sh $(GPU_CHECK_ARGS)

gpu-prepare: ## without a GPU: compile all that gpu-check runs, for a machine that cannot, into .gpu-check
	PYTHON=$$(scripts/find_python.sh) && PYTHON="$$PYTHON" scripts/gpu_check.sh --prepare

wheels: $(PY) ## the source distribution, and wheels of it for CPython 3.11 to 3.14, into dist (needs Docker)
	@scripts/pip_install.sh $(VENV) 'setuptools>=77' cibuildwheel==4.3.5
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(PY) setup.py -q sdist --dist-dir dist
	$(PY) -m cibuildwheel --output-dir dist dist/kitsune_jax-*.tar.gz

clean: ## remove what these targets made
	rm -rf .venv .venv-* .gpu-check* build dist out site *.egg-info .make
	find kitsune_jax -name '*.so' -delete

# Set-up. The environment is editable, so only a change of the C++ sources or of the packaging runs pip again.
$(PY):
	@scripts/make_venv.sh $(VENV)

$(VENV)/.examples: pyproject.toml setup.py $(NATIVE) | $(PY)
	@cxx=$$(scripts/check_compiler.sh) && echo "building the extension with $$cxx and installing into $(VENV)" && \
	  CC="$${CC:-$$cxx}" CXX="$$cxx" scripts/pip_install.sh $(VENV) --editable '.[test,examples]'
	@touch $@

# A second CUDA compiler, beside the newest, which the environment has: machine code is tested as both make it (tests/support/cuda_compilers.py).
$(VENV)/.nvrtc-13.0: | $(VENV)/.examples
	@[ "$$(uname -s)" != Linux ] || scripts/pip_install.sh $(VENV) --upgrade --no-deps --target $(VENV)/nvrtc-13.0 nvidia-cuda-nvrtc==13.0.88
	@touch $@

# The tools alone: naming the package's extra here would build the extension once more.
$(VENV)/.lint: pyproject.toml $(VENV)/.examples
	@scripts/pip_install.sh $(VENV) $$($(PY) -c 'import tomllib; \
	  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"])')
	@touch $@

$(VENV)/.docs: pyproject.toml $(VENV)/.examples
	@scripts/pip_install.sh $(VENV) $$($(PY) -c 'import tomllib; \
	  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

# JAX's CUDA plugin, and what the check builds the extension in place with.
$(VENV)/.gpu: $(VENV)/.examples
	@scripts/pip_install.sh $(VENV) 'jax[cuda13]' $$($(PY) -c 'import tomllib; \
	  print(*(r for r in tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"] if "jaxlib" not in r))')
	@touch $@

include cpu/tests/cpu.mk
