# Every target sets up what it needs; nothing is assumed but Debian or Ubuntu, Python 3.11+ and the package registries.
#   make demo [CONNECTOR=shared_memory]   serve one request through four processes, show where the bytes went
#   make test [PART=core|suite|plugins|serve|contract|repo|vllm]   every test, or a part
#   make lint | bench | bench-vllm | docs | clean

SHELL      := /bin/bash
PYTHON     ?= python3
VENV       := .venv
BIN        := $(VENV)/bin
MEMBERS     = omni_connector_core $(addprefix plugins/,$(PLUGINS)) contract_tests serve
PROJECTS   := pyproject.toml $(addsuffix /pyproject.toml,$(MEMBERS)) requirements/sdk.txt requirements/sdk-nodeps.txt
NATIVE     := omni_connector_core/hatch_build.py $(wildcard omni_connector_core/native/*)
READY      := $(VENV)/.ready
CONNECTOR  ?= shared_memory
PART       ?=
JOBS       ?= 2
PLUGINS    := $(patsubst plugins/%/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
BACKENDS   ?= memory $(PLUGINS)
SUITE      := $(patsubst contract_tests/tests/test_%.py,%,$(wildcard contract_tests/tests/test_*.py))
PARTS      := core suite plugins serve contract repo vllm
PYTEST     := $(BIN)/python -m pytest

.PHONY: help setup demo test lint bench bench-vllm vllm-env docs matrix clean $(addprefix test-,$(PARTS))
.DEFAULT_GOAL := help

help:
	@sed -n '2,6s/^# \{0,1\}//p' Makefile

setup: $(READY)

# torch is pinned first: an unpinned one brings gigabytes of CUDA. The members are installed once as dependencies of the root
# and then again, editable, so that a change is seen without a reinstall.
$(READY): $(PROJECTS) $(NATIVE) requirements/apt.txt
	@echo "== setting up $(VENV) (once, a few minutes)"
	@requirements/apt.sh
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q torch==2.13.0
	@$(BIN)/python -m pip install -q -e '.[dev]'
	@$(BIN)/python -m pip install -q -r requirements/sdk.txt
	@$(BIN)/python -m pip install -q --no-deps -r requirements/sdk-nodeps.txt
	@$(BIN)/python -m pip install -q --no-deps $(addprefix -e ./,$(MEMBERS))
	@touch $(READY)

demo: setup
	@$(BIN)/omni-connector demo --connector $(CONNECTOR)

# ---- tests: one pytest run a part, so that a part can be run alone and its failure names it. Of the parts of several runs two go
# side by side, and print when they end: they wait for daemons and deadlines more than they compute.
test: setup
	@for part in $(or $(PART),$(PARTS)); do echo "== test: $$part"; \
	 case $$part in suite|plugins|contract) flags="--jobs $(JOBS) --output-sync=target";; *) flags=;; esac; \
	 $(MAKE) --no-print-directory $$flags test-$$part || exit 1; done

# Real daemons, kills and deadlines on a machine that may be busy: what failed is run once more, alone. A fault fails again.
define pytest
	@run="$(1) -o cache_dir=.pytest_cache/$@ $(2)"; \
	 $$run || { echo "== once more, what failed"; $$run --last-failed --last-failed-no-failures none; }
endef

test-core:
	$(call pytest,$(PYTEST),omni_connector_core/tests)
test-suite: $(addprefix test-suite-,$(SUITE))
test-suite-%:
	$(call pytest,$(PYTEST),contract_tests/tests/test_$*.py)
test-plugins: $(addprefix test-plugin-,$(PLUGINS))
test-plugin-%:
	$(call pytest,$(PYTEST),plugins/$*/tests)
test-serve:
	$(call pytest,$(PYTEST),serve/tests --ignore serve/tests/vllm)
test-repo:
	$(call pytest,$(PYTEST),tests)
test-contract: $(addprefix test-contract-,$(BACKENDS))
test-contract-%:
	@mkdir -p build/contract
	$(call pytest,$(PYTEST),--pyargs omni_connector_contract_tests --connector $* --contract-json build/contract/$*.json)
# A server starts its processes one after the other: two at a time use both cores.
test-vllm: vllm-env
	$(call pytest,.venv-vllm/bin/python -m pytest -n 2 --dist loadscope,serve/tests/vllm)

vllm-env:
	@serve/tests/vllm/make_env.sh

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy $(addsuffix /src,$(MEMBERS))
	@$(BIN)/lint-imports

bench: setup
	@for plugin in $(PLUGINS); do echo "== bench: $$plugin"; script=plugins/$$plugin/bench/bench_$$plugin.py; \
	 $(BIN)/python -m omni_connector_contract_tests.bench --connector $$plugin $$([ ! -f $$script ] || echo --against $$script) \
	 || exit 1; done
	@$(BIN)/python -m omni_connector_contract_tests.bench.compare build/bench docs/backends.png
	@$(BIN)/python docs/generate.py

bench-vllm: vllm-env
	@.venv-vllm/bin/python serve/bench_vllm.py

# the generated parts of the pages; the backend table is made from the results of the last `make test PART=contract`
matrix: setup
	@$(BIN)/python docs/generate.py

docs: setup
	@$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .venv-vllm build dist site demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -prune -exec rm -rf {} +
