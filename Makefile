# Every target sets up .venv by itself; nothing is installed again until pyproject.toml or constraints.txt changes.
# Extra arguments: make test ARGS="-k fold"

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp-installed
EXTRAS := hf,export,data,tensorboard,downstream,bench,dev

OLDEST := .venv-oldest
OLDEST_STAMP := $(OLDEST)/.stamp-installed
# What the dependencies are for. AugMix of grey images needs timm 1.0.30.
OLDEST_TESTS := $(patsubst %,tests/test_%.py,imports cli data exif onnx saved hub foreign_models training oneshot predictor width \
	tasks report runs live) --deselect 'tests/test_data.py::test_grey_models_get_grey_images[augmix-m3]'

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-oldest lint bench bench-full results families clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# torch first and by itself: the constraint decides its version before anything else can ask for another one.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

demo: $(STAMP) ## Make the model that comes with hetdpt faster, end to end: a table and an HTML report
	$(BIN)/python -m hetdpt demo $(ARGS)

test: $(STAMP) ## Run the tests and doctests, without the slow ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)

test-slow: $(STAMP) ## Run only the slow tests
	$(BIN)/python -m pytest -m slow $(ARGS)

# The lower bounds of pyproject.toml in an environment of their own, made anew whenever they change.
$(OLDEST_STAMP): pyproject.toml tests/lower_bounds.py
	$(PYTHON) -m venv --clear $(OLDEST)
	$(PYTHON) tests/lower_bounds.py > $(OLDEST)/bounds.txt
	$(OLDEST)/bin/python -m pip install -q -c $(OLDEST)/bounds.txt torch
	$(OLDEST)/bin/python -m pip install -q -c $(OLDEST)/bounds.txt -e '.[$(EXTRAS)]'
	@touch $@

test-oldest: $(OLDEST_STAMP) ## Try the oldest versions of all packages that pyproject.toml allows; slow
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 2 -W default $(OLDEST_TESTS) $(ARGS)

lint: $(STAMP) ## Check style, format and types
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

bench: $(STAMP) ## Measure a quick version of every benchmark on this machine, and name what got worse
	$(BIN)/python benchmarks/suite.py --quick $(ARGS)

bench-full: $(STAMP) ## Measure everything in docs/results.md; hours, and goes on where it was stopped
	$(BIN)/python benchmarks/suite.py $(ARGS)

results: $(STAMP) ## Write docs/results.md and docs/paper.md from benchmarks/results
	$(BIN)/python benchmarks/render.py

families: $(STAMP) ## Write docs/families.md: which model families work
	$(BIN)/python benchmarks/families.py --out docs/families.md $(ARGS)

clean: ## Remove caches and build artefacts (not .venv)
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
