# Two commands matter: `make run` and `make test`. Both make their own .venv.
VENV := .venv
BIN := $(VENV)/bin
# The first interpreter that is 3.11 or newer; PYTHON=... overrides.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$p; break; fi; done)
REPLICAS ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: run test test-real test-compiled compiled overhead lint types unit loadtest clean

run: $(VENV)/.run
	$(BIN)/python -m loadtests.stack $(addprefix --replica ,$(REPLICAS))

test: lint types unit

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.dev
	$(BIN)/mypy

unit: $(VENV)/.dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Against real vLLM replicas on this machine's CPU. `loadtests/real/setup.sh VLLM_VENV MODEL` makes what it needs.
test-real: $(VENV)/.dev
	@test -n "$(VLLM_VENV)" -a -n "$(MODEL)" || { echo "usage: make test-real VLLM_VENV=... MODEL=...; \
	loadtests/real/setup.sh makes both"; exit 1; }
	VLLM_VENV="$(VLLM_VENV)" MODEL="$(MODEL)" $(BIN)/python -m pytest -m real tests/real $(PYTEST_ARGS)

loadtest: $(VENV)/.dev
	$(BIN)/python -m loadtests.stack --run-locust $(LOCUST_ARGS)

# The hot modules as extensions, beside the others in build/compiled, and a wheel of them in dist. Needs a C++ compiler.
compiled: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet wheel
	$(BIN)/python deploy/compile.py --wheel dist

test-compiled: compiled
	cd build/compiled && PYTHONPATH=. ../../$(BIN)/python -m pytest $(PYTEST_ARGS)

# CPU, latency and memory beside other routers: `make overhead OVERHEAD_ARGS="--quick"`. Measures what is compiled.
overhead: compiled
	cd build/compiled && ../../$(BIN)/python -m gateway.cli bench overhead $(OVERHEAD_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none found on PATH"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e '.[dev,test,loadtest,kv-events]'
	touch $@ $(VENV)/.run
