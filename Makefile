.PHONY: test coverage mutants test-versions test-browser test-long docs demo tables speed dist clean

PYTHON ?= python3
BIN := .venv/bin
JOBS ?= 2

# The networks of the tests are tiny: several threads would only wait for each other.
test test-long coverage mutants test-versions: export OMP_NUM_THREADS = 1
# The tests start many processes, which need not compile the same files again.
test test-long coverage mutants: export PYTHONDONTWRITEBYTECODE =

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n $(JOBS) --dist loadfile
	$(MAKE) docs

# opens the report in Chromium, which is installed if need be and possible; without it, the tests are skipped
test-browser: .venv/installed
	@if ! { command -v chromium && command -v chromedriver; } >/dev/null; then \
		timeout 600 sh -c 'apt-get update && apt-get install --yes --no-install-recommends chromium chromium-driver' \
			>/dev/null 2>&1 || echo "Please install Chromium and its driver (Debian: chromium, chromium-driver)."; \
	fi
	$(BIN)/pytest -m browser tests/results/test_browser.py

test-long: .venv/installed
	$(BIN)/pytest -m long

# branches of the package that the tests take, processes that they start included
coverage: .venv/installed
	$(BIN)/pytest -n $(JOBS) --dist loadfile --cov --cov-report=term:skip-covered

# breaks formulas and guards on purpose and lists which test notices
mutants: .venv/installed
	$(BIN)/python -W ignore -m tests.mutants.run --jobs $(JOBS)

# the tests on the oldest and the newest supported versions of what the package needs; FEW="3.10 oldest" for some
test-versions: .venv/installed
	$(BIN)/python -m tests.versions $(FEW)

docs: .venv/installed
	$(BIN)/sphinx-build -W --keep-going -q docs docs/_build/html
	@echo "The site is docs/_build/html/index.html"

demo: .venv/installed
	$(BIN)/became demo

tables: .venv/installed
	$(BIN)/python -m experiments.tables

speed: .venv/installed
	$(BIN)/python experiments/speed/table.py $(if $(DATA),--data $(DATA))

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

dist: .venv/installed
	$(BIN)/uv build --quiet --out-dir dist

clean:
	rm -rf .venv
