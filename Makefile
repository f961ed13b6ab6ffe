# What people run. Each target does its own set-up; `make` alone lists them.

PORT ?= 8080
MODEL ?= models/SmolLM2-135M-Instruct
# Which build of torch: cpu or gpu.
TORCH ?= cpu
VENV ?= .venv
# More arguments for serve, pytest or the benchmark.
ARGS ?=
TAG ?= invocant:$(TORCH)
BASE ?= python:3.12-slim

PYTHON_IN_VENV := $(VENV)/bin/python
DEMO_MODEL := models/SmolLM2-135M-Instruct

.DEFAULT_GOAL := help
.PHONY: help setup model run test check format docs bench image lock clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: ## make .venv from the lock files (TORCH=gpu for the CUDA build)
	@VENV=$(VENV) scripts/setup.sh $(TORCH)

model: setup ## bring the demo model and print its folder
	@$(PYTHON_IN_VENV) scripts/demo_model.py

run: setup ## serve a model on PORT=8080 (MODEL=folder or hub id, ARGS="more flags")
	@[ "$(MODEL)" != "$(DEMO_MODEL)" ] || $(PYTHON_IN_VENV) scripts/demo_model.py >/dev/null
	@exec $(PYTHON_IN_VENV) serve --model-id "$(MODEL)" --port $(PORT) --print-examples $(ARGS)

test: model ## run the tests (ARGS="-k chat" for some)
	@$(PYTHON_IN_VENV) -m pytest $(ARGS)

check: setup ## formatting, lint, types, architecture
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(PYTHON_IN_VENV) -m pytest -q tests/test_architecture.py

format: setup ## put the source into the project's form
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

docs: setup ## write the tables in docs/ anew from the source
	@$(PYTHON_IN_VENV) scripts/module_table.py
	@$(PYTHON_IN_VENV) -m container.command_line docs/configuration.md

bench: model ## measure tokens/s and latencies under load
	@$(PYTHON_IN_VENV) scripts/bench.py $(ARGS)

image: ## build the container image with docker, podman or buildah (TORCH, BASE, TAG)
	@scripts/build_image.sh "$(TAG)" "$(TORCH)" "$(BASE)"

lock: ## write requirements/*.txt anew (ARGS=--upgrade)
	@scripts/lock.sh $(ARGS)

clean: ## remove what was made here, the demo model's shared cache excepted
	rm -rf $(VENV) models build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
