# Everything runs in .venv, made here from python3 (3.10 to 3.15) with pip; a C compiler is all that is needed beside.
PYTHON ?= python3
BIN := .venv/bin
# cython-lint calls pycodestyle by name, and tests call fastrt by name.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Bytecode is kept even where the environment forbids it: a build starts 10 processes of Python, and the tests many more.
export PYTHONDONTWRITEBYTECODE :=
# Folders are listed too, so that a deleted file makes a new build; not the upper ones: bench is a target as well.
SOURCES := pyproject.toml setup.py MANIFEST.in $(wildcard README.md) $(shell find src $(wildcard protos bench) -mindepth 1 \
	-name __pycache__ -prune -o -name '*.egg-info' -prune -o -name '*.so' -o -name '*.c' -o -name '*.binpb' -o -print)

.DEFAULT_GOAL := help
.PHONY: help demo test check docs asan bench soak chaos simulate wheels clean

help: ## print this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: .venv/.installed ## build, install and run the demo: a parallel word count over the standard library
	$(BIN)/fastrt demo

test: .venv/.tools ## build, install, check style and types, run the tests (under 5 minutes on 2 cores)
	$(BIN)/ruff check .
	@# Each of these has one core to itself: 12 s instead of 23. The tests' modules are compiled beside them, once and not by
	@# each process of the tests; a fault in one is reported by the tests.
	$(BIN)/python -m pytest --collect-only -q > /dev/null 2>&1 & compiled=$$!; \
	$(BIN)/cython-lint src & style=$$!; $(BIN)/mypy && $(BIN)/python -m mypy.stubtest fastrt._core \
	--allowlist tests/stubtest_allowlist.txt --ignore-unused-allowlist; types=$$?; wait $$style || types=1; \
	wait $$compiled; exit $$types
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

check: asan ## `make asan`, a minute of fuzzing, real jaxlib 0.4.13 to 0.10.2, real torch and pandas, real Ray, long tests (30 to 50 minutes; downloads in .cache)
	-$(BIN)/python -m pip install --quiet --only-binary :all: atheris
	-$(BIN)/python -m pip install --quiet --only-binary :all: scikit-learn viztracer
	-$(BIN)/python -m pip install --quiet --only-binary :all: 'fastrt[docs]' playwright axe-playwright-python
	-command -v chromium > /dev/null || apt-get install --yes -qq chromium
	-$(BIN)/python -m pip install --quiet --only-binary :all: kubernetes-validate
	@# A type checker whose versions still change what it reports.
	-$(BIN)/python -m pip install --quiet --only-binary :all: ty==0.0.108
	-command -v promtool > /dev/null || apt-get install --yes -qq prometheus
	-$(BIN)/python -m pip install --quiet --only-binary :all: 'fastrt[spill]' s3fs 'moto[server]' 'fastrt[metrics]' 'fastrt[debugpy]'
	-test `id -u` != 0 || apt-get install -y -qq slurmctld slurmd slurm-client openmpi-bin mpich openssh-server openssh-client iproute2 tcpdump debootstrap
	@# These need extras, which `make test` does not install.
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/worker/test_debugpy.py tests/node/test_spill_storage.py tests/launch/test_manifest.py \
	tests/test_site.py tests/util/test_dask.py tests/util/test_joblib.py tests/typing/test_types.py
	$(BIN)/python tests/fuzz/fuzz.py 20
	$(BIN)/python tests/fuzz/parsers.py 2
	$(BIN)/python tests/support/jax_envs.py
	-$(BIN)/python tests/support/ray_env.py
	-$(BIN)/python tests/support/go_env.py
	-$(BIN)/python tests/support/herd_env.py
	-$(BIN)/python tests/support/free_env.py
	$(BIN)/python -m pytest tests/models/test_orders.py
	$(BIN)/python tests/support/libraries_env.py
	FASTRT_NO_SKIPS=1 .cache/libraries/bin/python -m pytest tests/store/test_libraries.py tests/store/test_serialize.py \
	tests/store/test_exchange.py tests/worker/test_native_threads.py
	FASTRT_JAX=1 $(BIN)/python -m pytest tests/conformance
	FASTRT_HISTORIES=50 $(BIN)/python -m pytest tests/coordination/test_histories.py
	FASTRT_LONG=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -o faulthandler_timeout=1860 --durations=30

docs: .venv/.docs ## build the site in build/site/html and check its links (Sphinx)
	$(BIN)/python docs/site/build.py

asan: .venv/.tools ## the core's tests on builds with AddressSanitizer, UndefinedBehavior- and ThreadSanitizer (4 minutes)
	$(BIN)/python tests/crash/sanitizers.py address
	$(BIN)/python tests/crash/sanitizers.py thread

bench: .venv/.tools ## run the benchmark suites; each run's figures stay in .benchmarks/ as JSON
	$(BIN)/python -m pytest bench --benchmark-only --benchmark-autosave

soak: .venv/.tools ## tasks, actors, spilling, cancels and kills for SECONDS=3600 on NODES=1: nothing is lost, nothing grows
	$(BIN)/python tests/crash/soak.py $(or $(SECONDS),3600) --nodes $(or $(NODES),1)

chaos: .venv/.tools ## kill processes at every point of the core and at random, and check that nothing is lost (long)
	$(BIN)/python tests/crash/chaos.py

SIMULATED = --nodes $(or $(NODES),5) --tasks $(TASKS) --drivers 4 --faults 8 --retries

simulate: .venv/.tools ## clusters in virtual time with faults anywhere, SEEDS=1000 of them or for SECONDS=3600, TASKS=500 on NODES=5; MUTANTS=60: faults put in are found; MUTANTS=renew: stale seeds of theirs are replaced
	$(if $(filter renew,$(MUTANTS)),,$(BIN)/python -m tests.simulation $(if $(TASKS),$(SIMULATED),--mixed) --jobs 2 $(if $(SECONDS),--seconds $(SECONDS),--seeds $(or $(SEEDS),1000)))
	$(if $(MUTANTS),$(BIN)/python -m tests.simulation --mutants --jobs 2 $(if $(filter renew,$(MUTANTS)),--renew --seconds $(or $(SECONDS),300),--seeds $(MUTANTS)))

wheels: .venv/.tools ## wheels for Python 3.10 to 3.15, x86_64 and aarch64, glibc and musl, repaired and tested, in wheelhouse/; ARGS="--machine x86_64 --libc gnu --python 3.11" makes one
	$(BIN)/python .ci/wheels.py $(ARGS)

clean: ## remove everything that was built, .venv too
	rm -rf build dist wheelhouse .venv .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache src/*.egg-info
	find src -name '*.so' -delete -o -name '*.binpb' -delete -o -name '*.c' -delete
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/pyvenv.cfg:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 16) and "Python 3.10 to 3.15 is needed, \
	this is " + sys.version.split()[0] + "; run for instance: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

# What pyproject.toml says that the build and the programs require. The compiler runs while pip installs the latter; the
# build needs no environment of pip's own, in which it would install Cython and gRPC once more.
BUILD_REQUIRES := $(shell sed -n 's/^requires = \[\(.*\)\]$$/\1/p' pyproject.toml | sed 's/", /" /g')
TO_COMPILE := $(filter-out "grpcio%,$(BUILD_REQUIRES))
DEPENDENCIES := $(shell sed -n '/^dependencies = \[/,/^\]/s/^ *\("[^"]*"\),$$/\1/p' pyproject.toml)

.venv/.installed: $(SOURCES) | .venv/pyvenv.cfg
	$(BIN)/python -m pip install --quiet --no-compile $(TO_COMPILE)
	$(BIN)/python -m pip install --quiet --no-compile $(BUILD_REQUIRES) $(DEPENDENCIES) & packages=$$!; \
	$(BIN)/python setup.py -q build_ext; built=$$?; wait $$packages && exit $$built
	rm -rf build/wheel
	$(BIN)/python -W ignore setup.py -q bdist_wheel --compression stored --dist-dir build/wheel 2> build/wheel.log || \
	{ cat build/wheel.log; exit 1; }
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --force-reinstall build/wheel/*.whl
	touch $@

# The tests' many processes need bytecode, of which the demo's installation leaves out what nothing imports.
.venv/.tools: .venv/.installed
	$(BIN)/python -m compileall -q -j 0 .venv/lib > /dev/null 2>&1 & \
	$(BIN)/python -m pip install --quiet 'fastrt[test]'; installed=$$?; wait; exit $$installed
	touch $@

# fastrt itself is installed already: pip adds the packages of the extra only.
.venv/.docs: .venv/.tools
	$(BIN)/python -m pip install --quiet 'fastrt[docs]'
	touch $@
