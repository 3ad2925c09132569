# `make help` lists what there is. Each target makes what it needs first, in `.venv`, and reuses it.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules
ENV := scripts/env.sh

.PHONY: help env wheel wheel-release demo lint format test test-rust test-python test-long bench clean distclean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

env: ## Make .venv: tools, vLLM's CPU build, the wheel
	@$(ENV) tools vllm wheel

wheel: ## Build the wheel for this machine into target/wheels and install it in .venv
	@$(ENV) wheel

wheel-release: ## Build the wheel for older Linux (glibc 2.17 or newer) into dist
	@scripts/wheel_release.sh

demo: ## Store, restart, reload with a real vLLM, and show it (DEMO_ARGS=--json)
	@$(ENV) tools vllm wheel
	@env -u PYTHONDONTWRITEBYTECODE .venv/bin/kvstrata demo $(DEMO_ARGS)

lint: ## Formats, lints, types; changes nothing
	@scripts/test.sh lint

format: ## Rewrite Rust and Python sources in their formats
	@$(ENV) tools
	cargo fmt --all
	.venv/bin/ruff check --fix-only --quiet . && .venv/bin/ruff format --quiet .

test: ## Everything a change must pass: lints, Rust, Python, end to end
	@scripts/test.sh lint rust python engine

test-rust: ## The Rust tests alone
	@scripts/test.sh rust

test-python: ## The Python tests without a vLLM engine
	@scripts/test.sh python

test-long: ## `make test`, then what takes longer
	@scripts/test.sh lint rust python engine long

bench: ## GB/s of the disk path by row size; KVSTRATA_BENCH_DIR names the directory to measure
	@mkdir -p "$${KVSTRATA_BENCH_DIR:=$(CURDIR)/.cache/bench}"; export KVSTRATA_BENCH_DIR; \
		cargo bench --locked -p kvstrata-benches

clean: ## Remove what was built; .venv stays
	rm -rf target dist .cache/pytest .cache/mypy .cache/reports .ruff_cache .hypothesis

distclean: clean ## Remove .venv and downloads too
	rm -rf .venv .cache
