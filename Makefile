# Everything runs from a virtual environment that the first target makes, from the pinned versions in constraints.txt.
# With nothing but Python >= 3.11 (with venv) and make on the machine: `make demo`, `make test`.

PYTHON ?= python3
VENV ?= .venv
# More for the command behind a target: make test ARGS="-k schema -x", make demo ARGS="--seed 3".
ARGS ?=
# Processes that run tests: `make test TESTERS=4`; 0 runs them in one process, for --pdb.
TESTERS ?= 2
# What the inner loop runs: the tests of every room that cost little. Kernels of GPUs have none of that kind: tests/gpu/test_suites.py.
QUICK := tests/test_layers.py tests/test_public_api.py tests/test_schema.py tests/test_arrays.py tests/test_errors.py \
	tests/contracts tests/gpu/test_requirements.py tests/offline/test_sources.py \
	tests/launching/test_launch.py::test_actors_return_when_they_are_told_to_and_what_they_started_goes_with_them \
	tests/test_cli.py::test_status_shows_tables_pages_policies_and_writers \
	$(addprefix tests/kernels/test_,cpu.py jit.py philox.py plan.py ragged_kernels.py reference.py returns.py) \
	$(addprefix tests/store/test_,files.py lifecycle.py limits.py weights.py words.py) \
	$(addprefix tests/sampling/test_,anchors.py completeness.py uniform.py) \
	$(addprefix tests/plane/test_,append.py batch.py checkpoint_limits.py delivery.py inspect.py limiter.py mixing.py queues.py \
	removal.py rows.py staleness.py table.py)
# The other libraries' environments, for `make benchmarks`.
PEERS_VENVS ?= .peers

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo check kernels test test-quick test-long perf benchmarks perf-compare torture clean

help:
	@echo "make demo      train DQN on CartPole with actors in their own processes"
	@echo "make test      run the tests"
	@echo "make test-quick  some of every room's, under two minutes once the kernels are built"
	@echo "make test-long  the tests of minutes each, which \`make test\` leaves out"
	@echo "make check     lint, formatting, types"
	@echo "make perf      measure against the bars, then the benchmarks (perf-results.json)"
	@echo "make benchmarks  all libraries by turns, to docs/benchmarks.md (half an hour, 14 GB of environments)"
	@echo "make perf-compare BASE=main  this tree against another commit, by turns"
	@echo "make torture   the long runs under random kills"
	@echo "make clean     remove the virtual environment, caches and build results"

install: $(VENV)/installed

# The stamps are the only rules that install. Each is written last, so an install that was cut short starts again.
$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Conduit needs Python >= 3.11, and $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[dev,demo]'
	@touch $@

$(VENV)/installed-peers: $(VENV)/installed
	$(INSTALL) -e '.[peers]'
	@touch $@

demo: $(VENV)/installed
	$(BIN)/conduit demo $(ARGS)

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

# Kernels are compiled once for all tests; without a linker each process compiles what it needs.
kernels: $(VENV)/installed
	@$(BIN)/python -m tests.library

test: kernels
	$(BIN)/python -m pytest -n $(TESTERS) --dist worksteal $(ARGS)

test-quick: kernels
	$(BIN)/python -m pytest -n $(TESTERS) --dist worksteal $(QUICK) $(ARGS)

test-long: kernels
	$(BIN)/python -m pytest -m long -o faulthandler_timeout=0 -n $(TESTERS) --dist worksteal $(ARGS)

perf: $(VENV)/installed-peers
	$(BIN)/python -m perf.bars engine $(ARGS)
	$(BIN)/python -m pytest perf --benchmark-enable --benchmark-only --benchmark-json=perf-results.json

# What does not install is told, left out, and said on the page.
benchmarks: $(VENV)/installed-peers
	-$(BIN)/python -m perf.peers.setup --folder $(PEERS_VENVS)
	$(BIN)/python -m perf.benchmarks --venvs $(PEERS_VENVS) $(ARGS)

perf-compare: $(VENV)/installed
	@test -n "$(BASE)" || { echo "expected a commit: make perf-compare BASE=main"; exit 2; }
	$(BIN)/python -m perf.compare $(BASE) $(ARGS)

torture: $(VENV)/installed
	$(BIN)/python -m pytest -m torture --timeout=0 -o faulthandler_timeout=0 $(ARGS)

clean:
	rm -rf $(VENV) build dist perf-results.json .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
