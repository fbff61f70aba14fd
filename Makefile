# make play    installs, then opens the best there is to play with
# make test    installs, then runs the tests
# make check   tests, lint and types: what CI runs
PYTHON ?= python3
BIN := .venv/bin

.PHONY: play test check lint types parity clean
play: .venv/ready
	$(BIN)/heedful generate shakespeare

test: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: lint types test

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/mypy

# The table of RESULTS.md: every family against its reference.
parity: .venv/ready
	PYTHONPATH=tests $(BIN)/python -m support.table

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv dist build
