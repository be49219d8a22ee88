# `make train` and `make test` on a fresh clone need python3.11 or newer and, the first time, a
# network.
# What they install into .venv stays until pyproject.toml changes.

VENV := .venv
BIN := $(VENV)/bin
STEPS := 60
# Test files that run at the same time; each takes about a core and 3 GB.
WORKERS := 2

# Asked, not looked up: the shims of version managers exist for Pythons that they cannot run.
PYTHON = $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import ensurepip, sys, venv; \
		sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null \
	&& echo $$python && break; done)

.PHONY: train test quick nightly parity lint docs clean

# A small GPT, on Python's own library as text and eight virtual devices.
train: $(VENV)/installed
	$(BIN)/python scripts/train.py --model gpt2-nano --steps $(STEPS) \
		--cpu-devices 8 --mesh data=2,fsdp=2,tensor=2

# PYTEST_ARGS is added to every run of pytest: make test PYTEST_ARGS='-x -k resume'.
PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test: $(VENV)/installed-dev
	$(PYTEST) --durations=25 -m 'not nightly'

# While you work: what starts no process, compiles no step and takes no seconds.
quick: $(VENV)/installed-dev
	$(PYTEST) --hypothesis-profile quick --durations=5 \
		-m 'not processes and not compiles and not slow and not nightly'

# Long tests that seldom fail alone.
nightly: $(VENV)/installed-dev
	$(PYTEST) --durations=25 -m nightly

# Any legal plan against one device, with gpt and llama or MODEL=NAME alone, also another family:
#   make parity PLAN="data=2,fsdp=2,tensor=2 zero=3 microbatches=2"
PLAN = data=2,fsdp=2,tensor=2
parity: $(VENV)/installed-dev
	$(PYTEST) tests/training/test_equal_to_one_device.py --plan '$(PLAN)' \
		$(if $(MODEL),--model $(MODEL))

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# The site, into build/docs; a broken link or reference is an error. Building needs no network.
docs: $(VENV)/installed-docs
	$(BIN)/python docs/site/generate.py build/docs-source
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going build/docs-source build/docs

clean:
	rm -rf $(VENV) *.egg-info build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/installed: pyproject.toml
	$(if $(PYTHON),,$(error no python3.11 to python3.14 with venv was found; \
		install one (on Debian: python3 and python3-venv), or name yours: make PYTHON=...))
	@echo "installing optimus_jax into $(VENV) (once, some minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "installing what tests and linters need into $(VENV) (once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed
	@echo "installing what the site needs into $(VENV) (once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@
