# Two commands matter:
#   make train    set up .venv, then train the embedded example
#   make test     set up .venv, then run every check
# `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
# What the NVIDIA driver of this machine runs: cuda13, cuda12 or cpu. It chooses torch and the extra with CuPy.
CUDA ?= $(shell sh install.sh --cuda)
# The torch to install when the venv has none, as pip takes it: a version, a wheel or a URL, with options.
# Without a GPU the CPU build is found where pip's configuration offers one (find-links, index); otherwise say where:
#   make train TORCH='torch==2.13.0 --index-url URL_OF_AN_INDEX_OF_CPU_BUILDS'
TORCH ?= $(shell sh install.sh --torch)
# Overrides for `make train`, e.g. ARGS='max_steps=20 learning_rate=1e-3'.
ARGS ?=
# Options for pytest, e.g. PYTEST='-k packing'.
PYTEST ?=
# Processes that share the tests, each on one thread: 0 for none but pytest itself, as a debugger wants it.
WORKERS ?= 2
# With bytecode: pytest rewrites a thousand files once, and processes that tests start need not compile the core.
SHARED := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(if $(filter-out 0,$(WORKERS)),PYTEST_ADDOPTS='-n $(WORKERS)')

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PROJECTS := pyproject.toml core/pyproject.toml native/pyproject.toml $(sort $(wildcard plugins/*/pyproject.toml))
PLUGINS := $(patsubst %/pyproject.toml,%,$(filter-out pyproject.toml,$(PROJECTS)))
STAMP := $(VENV)/.set-up

.DEFAULT_GOAL := help
.PHONY: help setup train test test-slow test-fuzz test-gpu test-ray test-triton lint format types docs site dist native \
  clean
.DELETE_ON_ERROR:

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make .venv with torch, the tools and every plugin; again when a pyproject.toml changed

train: $(STAMP) ## Train the embedded example; ARGS= are overrides
	$(BIN)/surogate demo $(ARGS)

test: lint types ## Lint, types and the tests; WORKERS=0 for one process
	$(SHARED) $(BIN)/python -m pytest $(PYTEST)

test-slow: $(STAMP) ## The tests that take minutes
	$(SHARED) $(BIN)/python -m pytest -m 'slow and not gpu' $(PYTEST)

test-fuzz: $(STAMP) ## Ten thousand drawn configurations, data files, checkpoints and templates
	$(SHARED) $(BIN)/python -m pytest -m fuzz $(PYTEST)

test-gpu: $(STAMP) ## The tests that need an NVIDIA GPU
	$(BIN)/python -m pytest -m gpu $(PYTEST)

test-ray: $(STAMP) ## The tests of runs on a Ray cluster; installs Ray into .venv
	$(PIP) install --no-build-isolation -e 'plugins/surogate-launcher-ray[cluster]'
	$(BIN)/python -m pytest -m 'not gpu' plugins/surogate-launcher-ray tests/launch/test_ray.py $(PYTEST)

# Beside .venv's own packages, because a torch for CPUs must not find Triton in the other tests. Triton's interpreter
# takes an array with one element for a number, which NumPy 2.4 refuses.
test-triton: $(STAMP) ## Compile Triton's kernels for every chip, and interpret them; installs Triton (640 MB)
	$(PIP) install --upgrade --no-deps --target $(VENV)/triton 'triton==3.6.*' 'numpy==2.3.*'
	PYTHONPATH=$(abspath $(VENV))/triton $(SHARED) $(BIN)/python -m pytest -m 'not gpu' plugins/surogate-kernels-triton $(PYTEST)

lint: $(STAMP) ## ruff check and ruff format --check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## Let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## mypy
	MYPY_NUM_WORKERS=2 $(BIN)/mypy

dist: $(STAMP) ## Wheels and sdists of all distributions in dist/, with their digests
	rm -rf dist
	$(BIN)/python scripts/release.py --output dist

native: $(STAMP) ## Compile the CUDA kernels ahead of time with nvcc; without it that is done at first use
	$(BIN)/python scripts/build_native.py

docs: $(STAMP) ## Write the pages of docs/ that are made from the code
	$(BIN)/python scripts/make_config_docs.py
	$(BIN)/python scripts/make_hook_tables.py
	$(BIN)/python scripts/make_coming_from.py
	$(BIN)/python scripts/make_plugins_page.py
	$(BIN)/python scripts/make_reference.py
	$(BIN)/python scripts/make_stub.py
	$(BIN)/python scripts/make_surface.py
	$(BIN)/python scripts/make_dockerfiles.py

site: $(STAMP) ## Build the documentation into site/; its links are checked
	$(BIN)/python scripts/make_site.py
	@echo 'site/index.html; to read and search it: $(BIN)/python -m http.server -d site'

clean: ## Remove .venv and what the tools left
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone: nothing else may choose its build. The plugins are built with the tools of the venv
# (--no-build-isolation), so hatchling, and editables that it needs for editable installs, come before them.
$(STAMP): Makefile $(PROJECTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed. Fix: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' || $(PIP) install $(TORCH)
	$(BIN)/python -c 'import tomllib; \
	  print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"], \
	  *tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["docs"], "editables", sep="\n")' \
	  > $(VENV)/dev-requirements.txt
	$(PIP) install -r $(VENV)/dev-requirements.txt
	$(PIP) install --no-build-isolation -e '.$(if $(filter cuda%,$(CUDA)),[$(CUDA)])' $(addprefix -e ,$(PLUGINS))
	touch $@
