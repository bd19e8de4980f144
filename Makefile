# Every target sets up what it needs, once: .venv is rebuilt only when pyproject.toml, constraints.txt or references.txt
# changes.
SHELL := /bin/bash
.ONESHELL:
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export MLFLOW_DISABLE_TELEMETRY := true
export OMP_NUM_THREADS := 1

.PHONY: search test slow lint check docs findings dashboard lock clean

search: $(READY)
	@"$(BIN)/assay" search quickstart

test: $(READY)
	@"$(BIN)/python" -m pytest -n 2 --dist worksteal -m "not slow and not fault"

slow: $(READY)
	@"$(BIN)/python" -m pytest -n 2 --dist worksteal -m "slow or fault" --durations=40

lint: $(READY)
	@"$(BIN)/ruff" format --check .
	"$(BIN)/ruff" check .
	"$(BIN)/mypy"
	"$(BIN)/lint-imports"

check: lint test

docs: $(READY)
	@"$(BIN)/assay" blocks --markdown docs/blocks.md
	"$(BIN)/python" tests/experiment_page.py
	ASSAY_WRITE_DOCS=1 "$(BIN)/python" -m pytest -q tests/blocks

findings: $(READY)
	@"$(BIN)/python" benchmarks/findings.py $(ARGS)

dashboard: $(READY)
	@"$(BIN)/assay" dashboard

lock: $(READY)
	@UV_FIND_LINKS= "$(BIN)/uv" pip compile --universal --python-version 3.11 --no-annotate --no-header pyproject.toml pin.in --extra dev -o constraints.txt

$(READY): pyproject.toml constraints.txt references.txt
	@$(PYTHON) -c 'import sys; sys.exit("Assay needs Python >= 3.11; name one with: make PYTHON=/path/to/python3.11 ...") if sys.version_info < (3, 11) else None'
	echo "Setting up $(VENV) (once; about two minutes with a cold package cache) ..."
	$(PYTHON) -m venv "$(VENV)"
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt uv setuptools
	UV_FIND_LINKS="$${PIP_FIND_LINKS:-}" "$(BIN)/uv" pip install --quiet --compile-bytecode --python "$(BIN)/python" -c constraints.txt -e '.[dev]' 2>"$(VENV)/uv.log" ||
	  { echo "uv could not ($(VENV)/uv.log says why); pip does it, more slowly ..."; "$(BIN)/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'; }
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check --no-deps -r references.txt
	touch "$(READY)"

clean:
	rm -rf "$(VENV)"
