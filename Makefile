# `make help` lists what there is. Each target makes what it needs first, in `.venv`, and reuses it.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules
ENV := scripts/env.sh
BENCH = mkdir -p "$${KVSTRATA_BENCH_DIR:=$(CURDIR)/.cache/bench}"; export KVSTRATA_BENCH_DIR; \
	cargo bench --locked -p kvstrata-benches --bench

.PHONY: help env wheel wheel-release demo demo-s3 lint format test test-rust test-places test-python test-long bench bench-recovery bench-manager bench-objects bench-lookups bench-policy bench-instructions clean distclean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

env: ## Make .venv: tools, vLLM's CPU build, the wheel
	@$(ENV) tools vllm wheel

wheel: ## Build the wheel for this machine into target/wheels and install it in .venv
	@$(ENV) wheel

wheel-release: ## Build the wheel for older Linux (glibc 2.17 or newer) into dist
	@scripts/wheel_release.sh

demo: ## Store, restart, reload with a real vLLM, and show it (DEMO_ARGS=--json)
	@$(ENV) tools vllm wheel
	@env -u PYTHONDONTWRITEBYTECODE .venv/bin/kvstrata demo $(DEMO_ARGS)

demo-s3: ## The same with a bucket as the lowest tier, on a SeaweedFS of its own
	@$(ENV) tools vllm servers wheel
	@env -u PYTHONDONTWRITEBYTECODE .venv/bin/kvstrata demo --tier s3 --weed .cache/servers/bin/weed $(DEMO_ARGS)

lint: ## Formats, lints, types; changes nothing
	@scripts/test.sh lint

format: ## Rewrite Rust and Python sources in their formats
	@$(ENV) tools
	cargo fmt --all
	.venv/bin/ruff check --fix-only --quiet . && .venv/bin/ruff format --quiet .

test: ## Everything a change must pass: lints, Rust, Python, end to end
	@scripts/test.sh lint chaos+rust places+python schedules+next+engine

test-rust: ## The Rust tests alone
	@scripts/test.sh chaos+rust schedules

test-places: ## The Rust tests of engines and tier on other file systems, in a sandbox, with low limits
	@scripts/test.sh places

test-python: ## The Python tests without a vLLM engine
	@scripts/test.sh python next

test-long: ## `make test`, then what takes longer
	@scripts/test.sh lint chaos+rust places+python schedules+next+engine long

bench: ## GB/s of the disk path by row size; KVSTRATA_BENCH_DIR names the directory to measure
	@$(BENCH) disk_path

bench-recovery: ## Seconds and memory to open a tier by the number of its rows
	@$(BENCH) recovery

bench-objects: ## GB/s of the object tier beside a plain client (BENCH_ARGS=--server plain)
	@$(ENV) tools servers wheel
	@.venv/bin/python scripts/bench_objects.py $(BENCH_ARGS)

bench-lookups: ## Lookups in a bucket of a million rows: time on the caller's thread, and memory
	@cargo bench --locked -p kvstrata-benches --bench object_lookups

bench-manager: ## Time in the offloading manager's methods, beside vLLM's manager on the same calls
	@$(ENV) tools vllm wheel
	@VLLM_TARGET_DEVICE=cpu .venv/bin/python benches/python/manager_cost.py $(BENCH_ARGS)

bench-policy: ## Time in the cache policy of vLLM's CPU manager, beside vLLM's own on the same calls
	@$(ENV) tools vllm wheel
	@VLLM_TARGET_DEVICE=cpu .venv/bin/python benches/python/policy_cost.py $(BENCH_ARGS)

bench-instructions: ## Instructions that a block takes under each policy, counted by valgrind
	@cargo bench --locked --quiet -p kvstrata-benches --bench instructions

clean: ## Remove what was built; .venv stays
	rm -rf target dist .cache/pytest .cache/mypy .cache/reports .ruff_cache .hypothesis

distclean: clean ## Remove .venv and downloads too
	rm -rf .venv .cache
