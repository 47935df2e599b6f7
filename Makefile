# `make demo` and `make test` need Python 3.11 or newer, make and pip. They install the rest into
# .venv: `make demo` what a run needs, `make test` the development environment on top.
# Neither repeats work: what has not changed is not installed, run or tested again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNNABLE := $(VENV)/.runnable
INSTALLED := $(VENV)/.installed
SOURCES := $(shell find src tests -type f -not -name '*.pyc' 2>/dev/null) README.md
# A pass without the data directory says nothing about a run with it.
TESTED := $(VENV)/.tested-$(subst /,_,$(FEDPACT_DATA))
# Bytecode is kept: dozens of tests start processes, each of which would compile fedpact anew.
SUITE := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 --dist worksteal

.PHONY: demo test retest slow bench evidence reference docs lint format lock clean

demo: runs/demo/.made
	@$(BIN)/fedpact report runs/demo

# A run of older code is no demonstration of this one. Its figures are printed by `report`.
runs/demo/.made: $(RUNNABLE) $(shell find src -type f -not -name '*.pyc' 2>/dev/null)
	@rm -rf runs/demo
	$(BIN)/fedpact run --out runs/demo > /dev/null
	@touch $@

test: $(TESTED)
	@echo "The suite has passed on these sources; 'make retest' runs it again."

retest: $(INSTALLED)
	$(SUITE) && touch $(TESTED)

$(TESTED): $(INSTALLED) $(SOURCES)
	$(SUITE)
	@touch $@

slow: $(INSTALLED)
	$(BIN)/pytest -m slow

# Every table of docs/benchmarks.md, measured on this machine (two hours). `make bench TABLES=kernel`:
# one kind, which goes on where it was stopped; TABLES="kernel --quick": a first look, not stored.
bench: $(INSTALLED)
	$(BIN)/python -m benchmarks $(TABLES)

# docs/evidence.md, and experiments/beyond's tables, from what experiments/ have stored;
# `python -m experiments.evidence` measures more.
evidence: $(INSTALLED)
	$(BIN)/python -m experiments.evidence --page
	$(BIN)/python -m experiments.beyond.table --page

# What each key of a configuration means, for the command line.
reference: $(INSTALLED)
	$(BIN)/python -m fedpact.cli.reference

# The site, in site/; it loads nothing from outside. To read it: python -m http.server -d site
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(INSTALLED)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

format: $(INSTALLED)
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

# Without --no-compile, pip compiles every module of torch and scipy; a run imports few of them.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

$(RUNNABLE): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, and $(PYTHON) is {v.major}.{v.minor}: call make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	@touch $@

# The versions and hashes that a deployment's image installs; uv has to be installed.
LOCK := src/fedpact/deployment/deploy.lock
lock:
	grep '^#' $(LOCK) > $(LOCK).new
	echo hatchling | uv pip compile --quiet pyproject.toml - --extra deploy -c constraints.txt \
	  --python-version 3.11 --generate-hashes --no-header --no-annotate --no-emit-find-links \
	  --no-emit-index-url >> $(LOCK).new
	mv $(LOCK).new $(LOCK)

$(INSTALLED): $(RUNNABLE)
	$(PIP) -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) runs site .pytest_cache .ruff_cache .hypothesis
