# `make run` and `make test` do all set-up on a fresh machine that has Python 3.11+, a C++ compiler and make.
PYTHON ?= python3
PORT ?= 7410
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := $(wildcard csrc/* csrc/*/*) CMakeLists.txt pyproject.toml
ROOMS := api cli connectors datapath engine web

.PHONY: setup run test bench lint types clean

setup: $(VENV)/.built

run: setup
	exec $(BIN)/kvdock demo --port $(PORT) $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

bench: setup
	@$(BIN)/python -m bench.copy --device cpu --json $(ARGS)
	@$(BIN)/python -m bench.control --json

lint: setup
	$(BIN)/ruff check .

# The rooms import as kvdock.*: mypy sees them where an installed package would have them.
types: setup build/types/.made
	$(BIN)/mypy build/types/kvdock tests bench

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis $(VENV)/.built
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(VENV)/.deps: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is wanted: make PYTHON=…")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r constraints.txt
	@touch $@

$(VENV)/.built: $(VENV)/.deps $(SOURCES)
	$(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

build/types/.made: Makefile
	@mkdir -p build/types/kvdock
	@for room in $(ROOMS); do ln -sfn ../../../$$room build/types/kvdock/$$room; done
	@ln -sfn ../../../csrc/_core.pyi build/types/kvdock/_core.pyi
	@touch $@
