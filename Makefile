# `make demo` and `make test` work on a fresh machine: they make .venv first, with the versions in constraints.txt.
#   PYTHON=python3.12   another interpreter (3.10 to 3.13)
#   EXTRA=tensorflow    the package with GPU support instead of tensorflow-cpu
#   SEEDS=0:100         the random programs of `make fuzz`
#   ARGS="-k name"      more arguments for pytest, the demo or the benchmarks

PYTHON ?= python3
EXTRA ?= cpu
WORKERS ?= 2
WAITING ?= 3
SEEDS ?= 0:3000
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: help install demo test test-rest test-all test-full fuzz damage corpus mistakes oracle bench bench-dist bench-pipeline bench-cost bench-remat bench-auto bench-mesh bench-steps docs lint format types dist compat clean distclean

help:
	@echo "make demo        train a Keras CNN on one device and over two replicas, and compare"
	@echo "make test        run the tests of every day (6 minutes on two cores)"
	@echo "make test-all    run every test (40 minutes);  make test-rest: those that make test leaves out (32 minutes)"
	@echo "make test-full   run the whole matrix, too (over an hour)"
	@echo "make fuzz        run 3,000 random programs under random configurations (hours; SEEDS=0:100 for fewer)"
	@echo "                 as jobs of several workers, ten programs in each: SEEDS=20000:20100 ARGS=--jobs"
	@echo "make damage      read 10,000 damaged files of ten formats (half an hour; ARGS='--cases 100' for fewer)"
	@echo "make corpus      run programs of public libraries, compare, write docs/corpus.md (an hour; ARGS='--only dcgan')"
	@echo "make mistakes    seed mistakes into rewrites, run them, and see what the certificate refuses (an hour)"
	@echo "make oracle      compare all rewritten graphs and plans with the recorded ones (minutes; ARGS='--only transformer')"
	@echo "make bench       measure rewrite throughput, step time, start-up time and memory"
	@echo "make bench-pipeline  measure two stages in two processes against one process"
	@echo "make bench-dist  measure two processes: exchanges, buckets, compressors on a slow link, MultiWorkerMirroredStrategy, servers"
	@echo "make bench-cost  compare the cost model's predictions with what this machine does"
	@echo "make bench-remat measure the memory that rematerialisation saves, and the time that it takes"
	@echo "make bench-steps overhead of a step in a loop of fifty beside that of a single one, and the speed of a fit"
	@echo "make bench-auto  plans of Auto under memory limits, measured, beside plans by hand"
	@echo "make bench-mesh  cost of a second mesh axis, and memory of logical devices, predicted and measured"
	@echo "make docs        build the documentation site into build/site; broken links are errors"
	@echo "make lint types  check the style and the types;  make format: repair the style"
	@echo "make dist        build the package into dist/, and install and try it in an environment of its own"
	@echo "make compat      install each TensorFlow that is supported as pip resolves it, run demo, tests and a job (hours)"
	@echo "make clean, make distclean: remove what was made"

install: $(VENV)/.ok

$(VENV)/.ok: setup.py constraints.txt
	@$(PYTHON) -c 'import sys; (3, 10) <= sys.version_info < (3, 14) or sys.exit("Python 3.10 to 3.13 is needed, \
	this is " + sys.version.split()[0] + ": try make PYTHON=python3.11")'
	@echo "Making $(VENV) (once; TensorFlow is a large download) ..."
	@# A distribution may split ensurepip off: then the interpreter's own pip fills the environment.
	$(PYTHON) -m venv --clear $(VENV) || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip -q --python $(BIN)/python install pip; }
	$(PIP) install -c constraints.txt setuptools wheel
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[$(EXTRA),dev]'
	@# tf_keras asks for `tensorflow`, whose files those of `tensorflow-cpu` are.
	$(PIP) install -c constraints.txt --no-deps tf-keras
	@# pip compiles what it installs, but not what it installs as editable: half a second at each start.
	$(BIN)/python -m compileall -q autograph_rewrite tools strategies benchmarks
	@touch $@

demo: $(VENV)/.ok
	$(BIN)/python examples/digits.py $(ARGS)

test: $(VENV)/.ok
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not full" $(ARGS)

# The processes of a job wait for each other half of the time, so one test process more than there are cores keeps them busy.
test-rest: $(VENV)/.ok
	$(BIN)/python -m pytest -n $(WAITING) -m "slow and not full" $(ARGS)

test-all: test
	$(MAKE) test-rest
	$(BIN)/python -m tests.compat --only 2.16 --parts install demo job

test-full: $(VENV)/.ok
	$(BIN)/python -m pytest -n $(WORKERS) -m "" --timeout 900 $(ARGS)

mistakes: $(VENV)/.ok
	mkdir -p out
	$(BIN)/python -m tests.seeded_mistakes --out out/mistakes.jsonl $(ARGS)

oracle: $(VENV)/.ok
	$(BIN)/python -m tests.oracle.digests compare --jobs $(WORKERS) $(ARGS)

fuzz: $(VENV)/.ok
	$(BIN)/python -m tests.fuzz --seeds $(SEEDS) --workers $(WORKERS) --out out/fuzz.jsonl $(ARGS)

damage: $(VENV)/.ok
	$(BIN)/python -m tests.damage --out out/damage.jsonl $(ARGS)

corpus: $(VENV)/.ok
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[corpus]'
	$(PIP) install --no-deps -r tests/corpus/no_dependencies.txt
	$(BIN)/python -m tests.corpus $(ARGS)
	$(BIN)/python -m tests.corpus table

bench: $(VENV)/.ok
	$(BIN)/python -m benchmarks $(ARGS)

bench-pipeline: $(VENV)/.ok
	$(BIN)/python -m benchmarks pipeline $(ARGS)

bench-dist: $(VENV)/.ok
	$(BIN)/python -m benchmarks dist dist_dense dist_servers dist_embedding $(ARGS)

bench-cost: $(VENV)/.ok
	$(BIN)/python -m benchmarks cost $(ARGS)

bench-remat: $(VENV)/.ok
	$(BIN)/python -m benchmarks remat largest_batch $(ARGS)

bench-steps: $(VENV)/.ok
	$(BIN)/python -m benchmarks steps_per_run $(ARGS)

bench-auto: $(VENV)/.ok
	$(BIN)/python -m benchmarks auto_memory $(ARGS)

bench-mesh: $(VENV)/.ok
	$(BIN)/python -m benchmarks mesh mesh_memory $(ARGS)

docs: $(VENV)/.ok
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q
	@echo "written to build/site/index.html"

lint: $(VENV)/.ok
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.ok
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# strategies/ and tools/ become part of the package only by being installed, so that is what gets checked.
types: $(VENV)/.ok
	@rm -rf build/lib build/types
	$(PIP) install --no-deps --no-build-isolation --target build/types .
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml \
	  --cache-dir ../../.mypy_cache -p autograph_rewrite

# The wheel is built of the sdist, and tried away from the checkout: nothing but the wheel can be imported.
dist: $(VENV)/.ok
	@rm -rf build/lib build/clean dist
	$(PIP) install build twine
	$(BIN)/python -m build -q --no-isolation
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m venv --without-pip build/clean
	$(PIP) --python build/clean/bin/python install -c constraints.txt "$$(echo dist/*.whl)[$(EXTRA)]"
	cd build/clean && bin/python -m autograph_rewrite --help && \
	  bin/python ../../tests/support/make_small_graph.py small.pb && \
	  bin/autograph-rewrite rewrite small.pb --config all_reduce --train-op train --output loss --init-op init -o new.pb

compat: $(VENV)/.ok
	$(BIN)/python -m tests.compat $(ARGS)
	$(BIN)/python -m tests.compat --table

clean:
	rm -rf build dist out *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
