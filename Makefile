# Two commands do all set-up on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
PORT ?= 7410
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard csrc/*) CMakeLists.txt pyproject.toml

.PHONY: setup run test bench lint types clean

setup: $(VENV)/.built

$(VENV)/.deps: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r constraints.txt
	@touch $@

$(VENV)/.built: $(VENV)/.deps $(SOURCES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@
