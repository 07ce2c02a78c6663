# Every target sets up what it needs. `make` alone lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
RULES  ?= routing_rules/helpdesk
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help demo test bench lint format run check lock system chaos test-sglang test-vllm clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(READY): requirements/dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned packages into $(VENV): once, 1 to 3 minutes, and silent unless something goes wrong"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: $(READY) ## route 120 labelled tickets with an embedded model and broker, twice; no account, GPU or Docker
	@$(BIN)/ticket-router demo $(ARGS)

run: $(READY) ## run the worker: make run RULES=routing_rules/helpdesk (brokers and engine from ROUTER_*)
	@$(BIN)/ticket-router run --rules $(RULES) $(ARGS)

check: $(READY) ## check rules, calibration, topics, engine, labels and cache of RULES
	@$(BIN)/ticket-router check --rules $(RULES) $(ARGS)

lint: $(READY) ## ruff, mypy strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Most tests wait for servers, so more of them than there are cores run at a time; those of one file share its servers.
test: $(READY) system lint ## everything: lint, all tests with a real Kafka, cache and model, and a short chaos run
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile $(ARGS)
	$(if $(ARGS),,$(BIN)/python -m tests.chaos --short --seed 66279 --deadline-s 600)

system: ## programs that only tests need: a Redis server and a browser (Debian; elsewhere bring your own)
	@deploy/test-packages.sh

chaos: $(READY) system ## kill and freeze workers, brokers, engine and cache by a seeded schedule: nothing lost, nothing twice (SHORT=1, SEED=7)
	$(BIN)/python -m tests.chaos $(if $(SHORT),--short) $(if $(SEED),--seed $(SEED)) $(ARGS)

test-sglang: $(READY) ## install (once, about 6 GB) and start a real SGLang on the CPU, run the engine's tests against it
	tests/servers/sglang/with_server.sh $(BIN)/python -m pytest -m sglang tests/contracts $(ARGS)

test-vllm: $(READY) ## install (once, about 6 GB) and start a real vLLM on the CPU, run the engine's tests against it
	tests/servers/vllm/with_server.sh $(BIN)/python -m pytest -m vllm tests/contracts $(ARGS)

bench: $(READY) system ## measure speed beside a plain loop and two frameworks (20 minutes; SHORT=1: 3); docs/performance.md
	$(BIN)/python -m tests.bench $(if $(SHORT),--short) $(ARGS)

format: $(READY) ## rewrite the code in the project's style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: $(READY) ## renew requirements/*.lock from pyproject.toml
	deploy/lock.sh

clean: ## remove what the targets made
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build
