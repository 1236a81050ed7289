# Two commands do all the set-up: `make demo` and `make test`.
#   make test PYTHON=python3.13          another interpreter (3.11 to 3.14)
#   make test ARGS="-k placement -x"     further arguments for pytest

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

SERIES := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
BIN := $(VENV)/bin
# An environment belongs to one series of Python and one pyproject.toml: its stamp says which.
CREATED := $(VENV)/.created-$(SERIES)

# Tests start hundreds of processes: none of them is to compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help demo test lint bench docs fuzz soak clean

help:
	@echo "make demo    train the four towers on the digits over two workers; writes plan.html, trace.json"
	@echo "make test    the full default test run"
	@echo "make lint    ruff, mypy, import-linter, and what no linter knows (tests/house)"
	@echo "make fuzz    a million inputs into every decoder (a quarter of an hour; ARGS=\"--inputs 10000\")"
	@echo "make soak    20,000 schedules of faults through the protocol (ARGS=\"--schedules N --seed S\")"
	@echo "make bench   the benchmarks, as ratios against torch and JAX (a large install)"
	@echo "make docs    the documentation as a site, out/docs/index.html; a warning is an error"
	@echo "make clean   remove the environment and everything that was built"

demo: $(VENV)/.installed-demo
	$(BIN)/python examples/digits_towers.py
	@for page in plan.html trace.json; do \
		if [ -f "$$page" ]; then echo "wrote $(CURDIR)/$$page"; \
		else echo "make demo: $$page was not written" >&2; exit 1; fi; done

# Three processes on two cores: half of the time tests wait for others. Each has a third of the files;
# one that has no more takes from another's end.
# ARGS="-n 0" for a debugger.
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/house/test_sources.py tests/house/test_security.py

soak: $(VENV)/.installed-dev
	$(BIN)/python -m tests.runtime.protocol.soak $(ARGS)

fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m tests.fuzz.soak $(ARGS)

bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/all.py $(ARGS)

docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs out/docs
	@echo "wrote $(CURDIR)/out/docs/index.html"

clean:
	rm -rf $(VENV) build dist out docs/reference plan.html trace.json benchmarks/results
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(CREATED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' || { \
		echo "graphflow needs Python 3.11 to 3.14, and $(PYTHON) is $(or $(SERIES),not found);" \
			"name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-%: $(CREATED)
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	@touch $@
