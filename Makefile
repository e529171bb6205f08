# `make train` and `make test` set up .venv by themselves. PYTHON chooses the interpreter.
PYTHON ?= python3
VENV ?= .venv
PRESET ?= rmt-tiny
BIN := $(VENV)/bin

.PHONY: train test test-compile test-all night mutations lint spelling docs wheel clean

train: $(VENV)/installed
	$(BIN)/python -m recipes.train --preset=$(PRESET) --data=stdlib --workdir=runs/$(PRESET)

# Python keeps what it compiled of the tests, whatever it does otherwise: to collect them takes half.
test test-compile test-all night mutations: export PYTHONDONTWRITEBYTECODE =

# With every commit; three workers on two cores, for many tests wait. What compiles for TPUs and GPUs is marked compile, and the rest of the night slow.
test: lint $(VENV)/installed-test
	$(BIN)/python -m pytest -n 3 --dist loadgroup -m "not slow and not compile"

# Kernels and small steps, compiled for every TPU generation and for GPUs.
test-compile: $(VENV)/installed-test
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "compile and not slow"

# Every night: also the slow ones, such as every store, mixer and pair of mesh axes, and full-size
# steps on the largest pods.
test-all: lint spelling docs $(VENV)/installed-test $(VENV)/installed-night
	$(BIN)/python -m pytest -n 2 --dist loadgroup

# The same in parts, and kernels by an emulator of a TPU. A part that has passed leaves a stamp in
# build/night, and is not run again until the code changes or the stamp is removed: a night that was
# cut off goes on with `make -k night`, and `make build/night/slow` runs one part.
NIGHT := fast slow compile emulate-on-wait emulate-eager
NIGHT_CODE := $(shell find pallas_kernels recipes rmt_tpu sharding tests -name '*.py' -o -name '*.toml')
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup
EMULATED := tests/pallas_kernels -m "not slow and not compile"
night: lint spelling docs $(NIGHT:%=build/night/%)
	@cat $(NIGHT:%=build/night/%)

build/night/fast: RUN = $(PYTEST) -m "not slow and not compile"
build/night/slow: RUN = $(PYTEST) -m "slow and not compile"
build/night/compile: RUN = $(PYTEST) -m compile
build/night/emulate-on-wait: RUN = $(PYTEST) --emulate=on_wait $(EMULATED)
build/night/emulate-eager: RUN = $(PYTEST) --emulate=eager --emulate_cores=2 $(EMULATED)

$(NIGHT:%=build/night/%): $(NIGHT_CODE) | $(VENV)/installed-test $(VENV)/installed-night
	@mkdir -p $(@D)
	begin=$$(date +%s) && $(RUN) && \
	echo "$(@F): $$(( $$(date +%s) - begin )) s" > $@ && cat $@

# Slips in the code, and which share of them tests notice: two hours, by night. What has
# been found out is kept in build/mutations: a run that was cut off goes on until the code changes.
SEED ?= 45
COUNT ?= 200
mutations: $(VENV)/installed-test
	$(BIN)/python -m tests.mutations --seed=$(SEED) --count=$(COUNT)

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# What can be installed without this checkout: dist/*.whl.
wheel: $(VENV)/bin/python
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir=dist .

# Common misspellings in code and documents.
spelling: $(VENV)/installed-docs
	$(BIN)/codespell

# The site, in build/site; a warning is an error.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; name another: make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: setup.py | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/installed-test: setup.py | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	rm -rf $(VENV)/cuda
	version=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("jax"))') && \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/cuda \
		jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version nvidia-cuda-nvcc
	touch $@ $(VENV)/installed

# For tests of the night alone; lm-evaluation-harness is half a gigabyte.
$(VENV)/installed-night: setup.py | $(VENV)/installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[night]'
	touch $@

$(VENV)/installed-docs: setup.py | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build *.egg-info
