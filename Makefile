# make play    installs, builds the page and opens it: everything there is to play with
# make page    builds the playground's page (web/) where it is missing or old
# make screenshots   pictures of every tab and the README's animation, into docs/images (needs chromium)
# make docs    builds the documentation, which `heedful serve` then has at /docs/: runs the lessons, checks the links
# make test    installs, then runs the tests
# make check   tests, lint and types: what CI runs, after it has built the documentation
# make wheel   the package for this platform, with its C kernels compiled, into dist; make wheel-aarch64 for Arm
# make real    fetches real weights (300 MB), for the tests that skip without them
PYTHON ?= python3
BIN := .venv/bin
SITE := src/heedful/serve/documentation
# Compiled modules are kept even where the environment says otherwise: the tests start a hundred processes, and each
# would compile all of torch and transformers that it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: play page docs screenshots test check lint types web wheel wheel-aarch64 real parity clean
play: .venv/dev page
	$(BIN)/heedful serve --open

page: .venv/dev
	$(BIN)/python hatch_build.py

# A page that did not change is not built again, nor is a lesson run again. HEEDFUL_LESSONS=off runs none.
docs: .venv/docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --jobs 2 -d docs/_build/doctrees docs docs/_build/html
	$(BIN)/python docs/check_links.py docs/_build/html
	rm -rf $(SITE)
	cp -r docs/_build/html $(SITE)

screenshots: .venv/dev page
	$(BIN)/python docs/screenshots.py
	$(BIN)/python docs/animation.py

# The page is built where npm is; without it the tests in a browser say why they skip.
test: .venv/dev
	-if command -v npm > /dev/null; then $(BIN)/python hatch_build.py; fi
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: lint types web test

# Layout, lint, types and unit tests of the page, where what it is built with was installed.
web: .venv/dev
	if [ -d web/node_modules ] && command -v npm > /dev/null; then cd web && npm run --silent lint && \
		npm run --silent check && npm test --silent && ../$(BIN)/python schema.py --check; \
	else echo "web: not checked, since web/node_modules is missing (npm ci)"; fi

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev
	$(BIN)/mypy

# The platform is the compiler's: CC names a cross compiler. auditwheel says on which systems the wheel runs.
wheel: .venv/dev page
	HEEDFUL_PREBUILT=require $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/python -m pip install --quiet --constraint constraints.txt auditwheel
	for file in dist/*-manylinux*.whl; do $(BIN)/auditwheel show $$file && $(BIN)/python -m zipfile -l $$file | grep -E 'prebuilt/'; done

# gcc-aarch64-linux-gnu is the cross compiler's package in Debian.
wheel-aarch64:
	$(MAKE) wheel CC=aarch64-linux-gnu-gcc

# A chat model, a sentence encoder and a writer of stories, into the user's cache; and a GRU that spells words out, in
# its package.
real: .venv/dev
	$(BIN)/heedful pull smollm2-135m-instruct all-minilm-l6-v2 stories15m
	$(BIN)/python -m pip install --quiet --no-compile --no-deps g2p-en==2.1.0

# The table of RESULTS.md: every family against its reference.
parity: .venv/dev
	PYTHONPATH=tests $(BIN)/python -m support.table

# .venv/docs is what the documentation needs, .venv/dev all. uv takes half a minute where pip takes two, and is told where
# pip's settings look for packages; where uv cannot be had or fails, pip installs (without --no-compile it turns 21,000
# modules into bytecode, most of which are never imported).
SOURCES = $(BIN)/python -m pip config list | sed -nE -e 's/\\n/ /g' \
	-e "s/.*\.(index-url|extra-index-url|find-links)='(.*)'/\1 \2/p" | \
	while read -r option values; do printf -- "--$$option %s " $$values; done
.venv/docs .venv/dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv && $(BIN)/uv pip install --quiet \
		--python $(BIN)/python --system-certs --index-strategy unsafe-best-match $$($(SOURCES)) \
		--constraint constraints.txt --editable '.[$(@F)]' || \
		$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[$(@F)]'
	touch .venv/docs $@

clean:
	rm -rf .venv dist build docs/_build $(SITE)
