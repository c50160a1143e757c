# The words for what one does here; `make` alone lists them.

BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help run test demo chaos bench check format clean drawing venv

help: ## List these words
	@sed -n 's/^\([a-z]*\):.* ## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

run: ## Start everything on this machine; Ctrl-C ends it
	@./run.sh

test: ## Run all tests; a skipped test is a failure
	@./test.sh

demo: ## Kill a worker in mid-task and watch another one finish
	@./demo.sh

chaos: ## Kill workers at random for a minute and prove that nothing went wrong
	@./chaos.sh

bench: ## Measure how fast this is, beside other queues, with few repetitions
	@./bench/run.sh --quick

check: venv ## Look without changing anything: format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy .
	$(BIN)/python -m pytest --quiet tests/tidy/test_layers.py

format: venv ## Put the code into its format and fix what can be fixed by a program
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Delete caches; the data (.local) and .venv stay
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -path ./.local -prune -o -type d -name __pycache__ -exec rm -rf {} +

drawing: ## Draw docs/architecture.png from its SVG (needs chromium and the font Inter)
	chromium --headless --no-sandbox --hide-scrollbars --window-size=1600,1000 \
		--screenshot=docs/architecture.png docs/architecture.svg

venv:
	@bash -c 'set -e; source scripts/venv.sh; ensure_venv requirements-dev.txt'
