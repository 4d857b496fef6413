# The verbs of the work. Each makes its own environment in .venv on first use; python3 and make are enough.
#
#   PYTHON=python3.13     the interpreter that .venv is made with (3.11 or newer)
#   TORCH_INDEX=...       where to take torch from. On Linux the default package index serves the CUDA build (gigabytes);
#                         the address of PyTorch's CPU wheel index is enough for everything here.

PYTHON ?= python3
TORCH_INDEX ?=

# Threads that wait for work sleep: spinning, they take the cores from each other where tests run side by side.
export OMP_WAIT_POLICY := passive

BIN := .venv/bin
READY := .venv/.ready
COLAB := .venv-colab
NBVAL := --nbval --nbval-current-env --nbval-sanitize-with notebooks/nbval_sanitize.cfg --nbval-cell-timeout 120

.DEFAULT_GOAL := help
.PHONY: help demo lab test test-browser test-colab notebooks release-links bench lint clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## compare the techniques on a GPT over real text; figure and page go to demo/
	$(BIN)/python -m memlab compare --output demo

lab: $(READY) ## open JupyterLab on the first notebook
	$(BIN)/python -m jupyterlab notebooks/00_start_here.ipynb

test: $(READY) ## run all tests, then every notebook against its stored outputs
	$(BIN)/python -m pytest -n 2
	$(BIN)/python -m pytest -n 2 --dist loadfile $(NBVAL) notebooks

test-browser: $(READY) ## run the browser tests alone: explorers and lessons in Chromium, pictures in browser-artifacts/
	$(BIN)/python -m pytest -m browser

test-colab: $(COLAB)/.ready ## run the lessons with Colab's versions, in an environment of its own
	$(COLAB)/bin/python notebooks/execute.py --check --jobs 2

notebooks: $(READY) ## run the lessons in place, store what they print, and make from them what is made of them
	$(BIN)/python notebooks/execute.py
	$(BIN)/python notebooks/solve.py
	$(BIN)/python notebooks/beliefs.py

release-links: ## point every link at your fork: make release-links REPO=owner/name
	$(PYTHON) notebooks/links.py $(REPO)

bench: $(READY) ## run the benchmarks one after the other
	@failed=0; for file in benchmarks/[a-z]*.py; do echo "== $$file"; $(BIN)/python "$$file" || failed=1; done; exit $$failed

lint: $(READY) ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean: ## remove all that was made here, the environment included
	rm -rf .venv $(COLAB) demo build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# Stamped last: an interrupted installation is taken up again.
$(READY): pyproject.toml constraints.txt
	$(call install,.venv,constraints.txt,'.[test]')
	@touch $@

$(COLAB)/.ready: pyproject.toml constraints-colab.txt
	$(call install,$(COLAB),constraints-colab.txt,'.[notebooks]' nbclient)
	@touch $@

# $(call install,environment,constraints,packages): memlab, as it stands here, with what it needs
define install
	@echo "making the environment in $(1): one to several minutes, once"
	$(PYTHON) -m venv $(1)
	$(if $(TORCH_INDEX),$(call pip,$(1),$(2)) --index-url $(TORCH_INDEX) torch)
	$(call pip,$(1),$(2)) --editable $(3)
endef
pip = $(1)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(2)
