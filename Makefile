.PHONY: test test-long docs demo tables speed dist clean

PYTHON ?= python3
BIN := .venv/bin

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest
	$(MAKE) docs

test-long: .venv/installed
	$(BIN)/pytest -m long

docs: .venv/installed
	$(BIN)/sphinx-build -W --keep-going -q docs docs/_build/html
	@echo "The site is docs/_build/html/index.html"

demo: .venv/installed
	$(BIN)/became compare --benchmark split-digits --seeds 3 --out runs/demo --engine processes \
		--methods finetune,ewc,lwf,agem,er,finetune+became,gpm,gpm-2x,gpm+became

tables: .venv/installed
	$(BIN)/python -m experiments.tables

speed: .venv/installed
	$(BIN)/python experiments/speed/table.py $(if $(DATA),--data $(DATA))

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

dist: .venv/installed
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf .venv
