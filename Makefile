# The two commands of the README, and what development needs. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -ec
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

fits = import sys, ensurepip, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 15))
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14 python3.10; do \
	$$python -c '$(fits)' >/dev/null 2>&1 && { echo $$python; break; }; done)
TORCH ?= torch==2.13.0
VENV ?= .venv
RANKS ?= 2
DEMO_FLAGS ?= --dtype float64
TESTS ?= tests
RELEASE_ARCHITECTURES ?= 8.0;8.6;8.9;9.0;10.0;12.0+PTX
TRIALS ?= 1000

bin := $(VENV)/bin
sources := setup.py pyproject.toml $(shell find csrc -type f 2>/dev/null)
formatted := $(shell find csrc tests benchmarks -name '*.h' -o -name '*.cpp' -o -name '*.cu' 2>/dev/null)
say = @printf '\n\033[1m[torchtp]\033[0m %s\n'

.PHONY: help env build demo test test-long chaos lint format sdist release-cuda clean distclean

help:  ## list the commands
	@echo 'torchtp: train on images cut over several devices'
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20
	@echo 'Variables: PYTHON=$(PYTHON) (3.10 to 3.14), TORCH="$(TORCH)" (what pip installs), VENV=$(VENV), RANKS=$(RANKS),'
	@echo '           TORCHTP_CUDA=0/1 (CPU or CUDA build; unset: by torch and nvcc), MAX_JOBS (compilers at once).'

$(VENV)/torch.stamp:
	@[ -n '$(PYTHON)' ] || { echo 'torchtp needs Python 3.10 to 3.14 with venv; name one: make PYTHON=/path/to/python3'; exit 1; }
	$(say) '1/3 making the environment $(VENV) with $(PYTHON) and installing $(TORCH) (a large download the first time)'
	@$(PYTHON) -m venv $(VENV)
	@$(bin)/python -m pip install -q --disable-pip-version-check $(TORCH)
	@touch $@

$(VENV)/tools.stamp: pyproject.toml | $(VENV)/torch.stamp
	$(say) '2/3 installing what the build, the demo and the tests need: setuptools, ninja, pytest, scikit-image, ...'
	@$(bin)/python -m pip install -q --disable-pip-version-check $$($(bin)/python tools/requirements.py build demo test)
	@touch $@

$(VENV)/built.stamp: $(sources) $(VENV)/tools.stamp
	$(say) '3/3 building torchtp (only what changed; minutes the first time), log in build/build.log'
	@command -v $(firstword $(CXX)) >/dev/null || { echo 'torchtp needs a C++ compiler: install g++, or clang with its OpenMP (libomp-dev), or name one: make CXX=...'; exit 1; }
	@mkdir -p build
	@$(bin)/python -m pip install -v --disable-pip-version-check --no-build-isolation --no-deps -e . 2>&1 | tee build/build.log \
	  | sed -unE 's,^ *(\[[0-9]+/[0-9]+\]).* -c [^ ]*/(csrc|units)/([^ ]*) .*,  \1 \3,p' || { tail -n 40 build/build.log; exit 1; }
	@touch $@

env: $(VENV)/tools.stamp  ## make the environment (VENV) with torch and the tools

build: $(VENV)/built.stamp  ## build torchtp in place; a second run rebuilds nothing

demo: $(VENV)/built.stamp  ## train on real images cut over RANKS processes and compare with one
	$(say) 'training on a stereo pair cut over $(RANKS) ranks, then on one rank to compare'
	OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore::FutureWarning $(bin)/torchrun --nproc-per-node $(RANKS) examples/train_disparity.py --check $(DEMO_FLAGS)

test: $(VENV)/built.stamp  ## run the whole test suite (TESTS=tests/test_x.py for a part)
	$(say) 'running $(TESTS)'
	$(bin)/python -m pytest $(TESTS) $(TEST_FLAGS)

test-long: $(VENV)/built.stamp  ## run the tests marked long, which take minutes or gigabytes each (TESTS=... for a part)
	$(say) 'running the long tests of $(TESTS)'
	$(bin)/python -m pytest -m long --timeout 1800 $(TESTS) $(TEST_FLAGS)

chaos: $(VENV)/built.stamp  ## kill, stop and slow ranks at random moments, TRIALS times; and nonsense in shared memory
	$(say) '$(TRIALS) trials'
	@$(MAKE) -s -C tests/cpp chaos_test hostile_test BUILD=$(CURDIR)/build/cpp/none \
	  TORCH_INCLUDE=$$($(bin)/python -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent / "include")')
	build/cpp/none/tests/cpp/chaos_test $(TRIALS)
	build/cpp/none/tests/cpp/hostile_test 20
	OMP_NUM_THREADS=1 $(bin)/python tests/chaos.py $(TRIALS)
	OMP_NUM_THREADS=1 $(bin)/python tests/chaos.py --hosts $(TRIALS)

$(VENV)/lint.stamp: pyproject.toml | $(VENV)/torch.stamp
	$(say) 'installing the formatters and checkers'
	@$(bin)/python -m pip install -q --disable-pip-version-check $$($(bin)/python tools/requirements.py lint)
	@touch $@

lint: $(VENV)/lint.stamp  ## check format and types: clang-format, ruff, mypy
	$(bin)/clang-format --dry-run -Werror $(formatted)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

format: $(VENV)/lint.stamp  ## format every file in place
	$(bin)/clang-format -i $(formatted)
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

sdist: $(VENV)/tools.stamp  ## make a source distribution in dist/
	$(say) 'packing the sources into dist/'
	@$(bin)/python setup.py -q sdist
	@ls dist/*.tar.gz

release-cuda: $(VENV)/tools.stamp  ## make a wheel in dist/ for cards from sm_80 to sm_120, with PTX for later ones (needs nvcc; long)
	$(say) 'building for $(RELEASE_ARCHITECTURES); log in build/release.log'
	@mkdir -p build
	@rm -rf build/release && $(bin)/python setup.py -q sdist -d build/release && tar -xzf build/release/*.tar.gz -C build/release --strip-components=1
	@TORCHTP_CUDA=1 TORCH_CUDA_ARCH_LIST='$(RELEASE_ARCHITECTURES)' \
	  $(bin)/python -m pip wheel -v --disable-pip-version-check --no-build-isolation --no-deps -w dist build/release >build/release.log 2>&1 \
	  || { tail -n 40 build/release.log; exit 1; }
	@ls -l dist/*.whl

clean:  ## remove what was built, keep the environment
	rm -rf build dist *.egg-info torchtp/_C*.so $(VENV)/built.stamp

distclean: clean  ## remove the environment too
	rm -rf $(VENV)
