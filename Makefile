# Every target sets up what it needs: Python 3.10+ is all that must be there.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What the demo needs, which is installed sooner than everything for development.
DEMO_STAMP := $(VENV)/.demo-installed
COMPILED := $(VENV)/.compiled
# Spark's own Kafka sink, to compare with, can be had whole for this version only.
SPARK41 := $(VENV)-spark41
SPARK41_STAMP := $(SPARK41)/.installed
# Ray and Daft, which only their examples and one benchmark need, and arrow-kafka-pyo3 for that benchmark.
ENGINES := $(VENV)-engines
ENGINES_STAMP := $(ENGINES)/.installed

# Spark's workers would otherwise run the python3 on PATH, which has none of this.
export PYSPARK_PYTHON := $(abspath $(BIN)/python)
export PYSPARK_DRIVER_PYTHON := $(PYSPARK_PYTHON)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without bytecode files each process compiles again what it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
# Of make chaos, make faults and make fuzz.
ROUNDS ?= 100
SEED ?= 1
EFFORT ?= 10
# Of make quick, make test and make full: processes that tests run in side by side (tests/support/lanes.py).
LANES ?= 4
# What the stages of a change leave to others: each prints it at its end.
NOT_QUICK = tests of several modules together, or that start Kafka, Spark or a browser (make test); the checks (make check)
NOT_CHECKED = all tests (make quick, make test); other versions of Python (make check-pythons)
NOT_TESTED = the checks (make check); longer runs (make full, chaos, exactly-once, faults, fuzz, endurance); all benchmarks (make smoke); other versions (make matrix)
IN_LANES = -n $(LANES) --dist loadgroup --no-loadscope-reorder --durations 20 --durations-min 1
# Of make check-pythons: the oldest and the newest that the project runs on.
PYTHONS ?= 3.10 3.13

.PHONY: help venv java classes chromium screenshots demo quick test coverage rehearsal check-api full chaos exactly-once fuzz kerberos smoke faults matrix engines endurance check check-types check-pythons pins format audit bench plots docs site broker clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# What a target needs of the system is installed with apt where it runs as root, after a line that says so.
# KAFKA_CHUNKED_INSTALL=no forbids it.
demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP)) java  ## write 336,776 real flights to a Kafka started here, read them back, compare
	@$(BIN)/python examples/flights.py

quick: export KAFKA_CHUNKED_TEST_EFFORT := 0.1
quick: $(COMPILED)  ## run in a minute the tests of single modules that start no Kafka, Spark or browser (ARGS="-k name" picks some)
	@$(BIN)/python -m pytest -q -m "not slow" -n $(LANES) --dist loadgroup --no-loadscope-reorder --not-run "$(NOT_QUICK)" $(ARGS)

test: $(COMPILED) classes chromium  ## run all tests, on real brokers, four at a time (ARGS="-k name" picks some)
	@$(BIN)/python $(if $(filter yes,$(COVERAGE)),tools/with_coverage.py,-m) pytest $(IN_LANES) --not-run "$(NOT_TESTED)" $(ARGS)

coverage:  ## make test, which then prints the modules whose lines and branches it covers least
	@$(MAKE) --no-print-directory test COVERAGE=yes

full: $(COMPILED) classes chromium  ## run all tests under kafka.buffer.memory.allocation.strategy=full
	@$(BIN)/python -m pytest --allocation-strategy full $(IN_LANES) $(ARGS)

chaos: $(STAMP) java  ## kill, freeze and restart brokers, break connections, check every row (ROUNDS=100 SEED=1)
	@$(BIN)/python -m tests.chaos --rounds $(ROUNDS) --seed $(SEED) $(ARGS)

exactly-once: $(STAMP) java  ## kill drivers, workers, brokers of queries that write exactly once, check every row (ROUNDS, SEED)
	@$(BIN)/python -m tests.exactly_once --rounds $(ROUNDS) --seed $(SEED) $(ARGS)

fuzz: export KAFKA_CHUNKED_TEST_EFFORT := $(EFFORT)
fuzz: $(STAMP)  ## search for harmful responses, orders of events and wrong encoded rows, ten times as long as make test does (EFFORT=10)
	@$(BIN)/python -m pytest tests/network tests/delivery/test_hostile_responses.py tests/scenarios/test_batch_lifecycle.py \
		tests/scenarios/test_tight_memory.py tests/transactions/test_protocol_model.py tests/formats/test_encoders_against_oracles.py \
		-k "oracles or fuzz or client_faults or hostile or lifecycle or whatever or protocol_model" $(ARGS)

kerberos: $(STAMP) java  ## log in by Kerberos, with a KDC out of Debian's packages (unpacked, not installed)
	@tools/with_kerberos.sh $(VENV)-kerberos $(BIN)/python $(BIN)/python -m pytest tests/security/test_kerberos.py $(ARGS)

smoke: export KAFKA_CHUNKED_TEST_EFFORT := 2
smoke: $(STAMP) java  ## run every benchmark on tiny input; make test leaves out those that take longest
	@$(BIN)/python -m pytest tests/benchmarks/test_benchmarks_run.py $(ARGS)

endurance: export KAFKA_CHUNKED_TEST_EFFORT := 25
endurance: $(STAMP) java  ## 2,000 cycles of producers with faults, 1,000 micro-batches: that nothing is left of them
	@$(BIN)/python -m pytest -s tests/endurance $(ARGS)

check: check-types  ## ruff, mypy strict, import layers, spelling, names in docs, limits on tests, the documentation's site
	$(BIN)/python -m pytest -q -p no:cacheprovider $(patsubst %,tests/project/test_%.py,names_in_docs limits plain_english)
	$(BIN)/codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Not run: $(NOT_CHECKED)"

check-types: $(STAMP)  ## of make check what depends on the Python: mypy strict
	$(BIN)/mypy $(TYPED)

# What is shipped and its examples: tests and benchmarks have the Python of make check.
# Also shows that constraints.txt can be installed there.
# PySpark comes as source. pip keeps the wheels that it makes, and uv makes another in 35 s for each environment.
check-pythons: $(STAMP)  ## make check-types on the oldest and the newest Python (PYTHONS="3.10 3.13")
	@for pinned in $$(sed -n 's/^\(pyspark==[^ ;]*\).*/\1/p' constraints.txt); do \
		$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(VENV)/wheels "$$pinned" || exit 1; \
	done
	@for version in $(PYTHONS); do \
		python=$$(tools/find_python.sh "$$version") || { \
			echo "error: there is no Python $$version here; name others, as in PYTHONS=3.11" >&2; exit 1; }; \
		echo "Checking on Python $$version ..."; \
		UV="$(abspath $(BIN)/uv)" UV_FIND_LINKS="$(abspath $(VENV)/wheels)" $(MAKE) --no-print-directory \
			check-types PYTHON="$$python" VENV="$(VENV)-$$version" \
			TYPED="kafka_sink pyspark_kafka_chunked.py pyspark_kafka_chunked_underscore.py packages/local_kafka/local_kafka examples" || exit 1; \
	done

rehearsal: $(STAMP) java  ## build what would be released, and try it in new environments without this checkout
	@tools/rehearse_release.sh "$(BIN)" $(PYTHONS)

check-api: $(STAMP)  ## ask pyright whether users' editors know the types of the whole public API
	@tools/check_api.sh "$(BIN)"

pins: $(STAMP)  ## renew constraints.txt: the newest versions of all that the checks and tests run with
	$(BIN)/uv pip compile --universal --python-version 3.10 --extra dev --upgrade --no-annotate \
		--custom-compile-command "make pins" pyproject.toml -o constraints.txt

# A mirror of PyPI may lack the answers that pip-audit asks for. Then it fails, as it cannot know.
audit: $(STAMP)  ## look up known holes of all dependencies, pinned and oldest (asks PyPI; ADVISORIES=folder: asks nobody)
ifdef ADVISORIES
	@$(BIN)/python tools/audit.py "$(ADVISORIES)"
else
	@$(BIN)/python tools/audit.py --oldest > $(VENV)/oldest.txt
	@$(BIN)/pip-audit --strict --disable-pip --no-deps -r constraints.txt -r $(VENV)/oldest.txt || { \
		echo "Without PyPI: make audit ADVISORIES=a checkout of https://github.com/pypa/advisory-database" >&2; \
		exit 1; }
endif

format: $(STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

faults: $(STAMP)  ## ROUNDS of tasks whose coordinator is killed, frozen, flooded (ROUNDS, SEED)
	@$(BIN)/python -m tests.support.fault_rounds $(ROUNDS) $(SEED)

matrix: $(STAMP) java  ## try Python 3.10 to 3.14, PySpark 3.5 to the newest, brokers from 2.1 on and others' (ARGS="--only others")
	@$(BIN)/python -m tests.matrix $(ARGS)

engines: $(ENGINES_STAMP)  ## run the examples for Ray Data and Daft with the real libraries, on scripted brokers
	@$(ENGINES)/bin/python -m pytest tests/examples/test_engines.py $(ARGS)

bench: $(STAMP) $(SPARK41_STAMP) $(ENGINES_STAMP) java  ## run the benchmarks against the peers (ARGS="throughput" picks one)
	@SPARK41_PYTHON=$(abspath $(SPARK41)/bin/python) ENGINES_PYTHON=$(abspath $(ENGINES)/bin/python) \
		$(BIN)/python -m benchmarks $(ARGS)

plots: $(STAMP)  ## draw the benchmarks' plots again from benchmarks/results (ARGS="throughput" picks one)
	@$(BIN)/python -m benchmarks --redraw $(ARGS)

docs: $(STAMP)  ## write the facts of the options table into docs/options.md
	$(BIN)/python -m tools.options_page > docs/options.md.part
	@mv docs/options.md.part docs/options.md

site: $(STAMP)  ## show the documentation as a site on http://127.0.0.1:8000, until Ctrl-C
	$(BIN)/mkdocs serve

broker: $(STAMP) java  ## run a Kafka on this machine until Ctrl-C (ARGS="--brokers 3 --port 9092")
	@$(BIN)/local-kafka $(ARGS)

venv: $(STAMP)  ## make the virtual environment in .venv with everything for development

java:  ## make sure that Java 17 or newer is there (installs it where it may)
	@tools/ensure_java.sh

chromium:  ## make sure that Chromium is there, for the test of the live view's page (installs it where it may)
	@tools/ensure_chromium.sh

screenshots: export KAFKA_CHUNKED_SCREENSHOTS := 1
screenshots: $(STAMP) chromium  ## take the pictures of the live view in docs/images
	@$(BIN)/python -m pytest -q tests/browser

clean:  ## delete the virtual environment and what the tools leave behind
	rm -rf $(VENV) $(SPARK41) $(ENGINES) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(STAMP): pyproject.toml packages/local_kafka/pyproject.toml constraints.txt
	@tools/setup_venv.sh "$(PYTHON)" "$(VENV)"
	@touch $@

$(DEMO_STAMP): pyproject.toml packages/local_kafka/pyproject.toml constraints.txt
	@EXTRA=demo tools/setup_venv.sh "$(PYTHON)" "$(VENV)"
	@touch $@

classes: $(STAMP) java  ## keep what Spark's JVMs load, for quicker starts
	@$(BIN)/python -m tests.support.jvms

# Workers that start side by side would each compile all tests for themselves. What is wrong with a test, they say.
$(COMPILED): $(STAMP)
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true
	@touch $@

$(SPARK41_STAMP): pyproject.toml constraints.txt
	@tools/setup_venv.sh "$(PYTHON)" "$(SPARK41)" pyspark==4.1.1
	@touch $@

$(ENGINES_STAMP): pyproject.toml constraints.txt
	@tools/setup_venv.sh "$(PYTHON)" "$(ENGINES)" "ray[data]" daft arrow-kafka-pyo3
	@touch $@
