# make decode     set up, then decode a prompt with a draft tree (ARGS="..." for others)
# make test       set up, then every check: style, import direction, tests
# make lint       style and import direction only (make format mends the style)
# make types      pyright
# make notebooks  execute the notebooks of colab/
# make compile-check  set up, then compile the kernels for GPUs and TPUs without one
# make compile-check-model  the decode step of the largest model for eight B200
# make compile-check-next  the same with the next JAX (COMPILE_VENV, NEXT_VENV: where)
# make clean      remove the environment, builds and caches

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
COMPILE_VENV := .venv-compile
NEXT_VENV := .venv-compile-next
WORKERS ?= 2
PROMPT ?= Tell me a story about a rabbit who has a lantern and lives near the river.
ARGS ?= --tree 3,3,3 --prompt "$(PROMPT)"
PIP = $(@D)/bin/python -m pip install -qq
NOTEBOOKS = $(or $(wildcard colab/*.ipynb),$(error colab/ holds no notebook))

# The tests of a file share compiled programs: one worker takes them all.
SPREAD = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# One thread per worker: two workers on two cores are faster than shared pools.
TEST_ENV = JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} OMP_NUM_THREADS=1 \
	XLA_FLAGS="$${XLA_FLAGS:-} --xla_cpu_multi_thread_eigen=false"

# The first Python 3.12: by name, then among the versions of pyenv.
IS_312 := import sys; sys.exit(sys.version_info[:2] != (3, 12))
PYTHON312 = $(shell for python in $(PYTHON) python3.12 python3 python \
	"$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12*/bin/python3; do \
	if "$$python" -c '$(IS_312)' >/dev/null 2>&1; then echo "$$python"; break; fi; done)
NO_PYTHON = No Python 3.12 found: JAX 0.11 needs it. Install it or say \
	make $(MAKECMDGOALS) PYTHON=PATH

.PHONY: help decode test lint format types notebooks compile-check compile-check-model \
	compile-check-next clean
help:
	@sed -n 's/^# \(make \)/\1/p' Makefile

decode: $(VENV)/core.done
	$(BIN)/python scripts/decode.py $(ARGS)

test: lint
	$(TEST_ENV) $(BIN)/python -m pytest $(SPREAD) $(PYTEST_ARGS)

lint: $(VENV)/test.done
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

format: $(VENV)/test.done
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(VENV)/test.done
	$(BIN)/pyright

notebooks: $(VENV)/notebooks.done
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(BIN)/python -m pytest -q \
	-o addopts="" -o filterwarnings=default --nbmake --nbmake-timeout=300 $(NOTEBOOKS)

compile-check: $(COMPILE_VENV)/compile.done
	$(COMPILE_VENV)/bin/python scripts/compile_check.py $(CHECK_ARGS)

# The peak of all 60 layers follows from 4 by formula, 0.4 % too low; without --layers
# all are compiled, which takes minutes for each of the six.
compile-check-model: $(COMPILE_VENV)/compile.done
	$(COMPILE_VENV)/bin/python scripts/compile_check.py --model qwen3.5-397b-a17b \
	--target B200x8 --layers 4 --tree 1,1,1 2,2,2 3,3,3 $(CHECK_ARGS)

compile-check-next: $(NEXT_VENV)/compile-next.done
	$(NEXT_VENV)/bin/python scripts/compile_check.py $(CHECK_ARGS)

clean:
	rm -rf $(VENV) $(COMPILE_VENV) $(NEXT_VENV) build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# Set-up. A stamp older than pyproject.toml means that the pins have changed.
$(VENV)/venv.done $(COMPILE_VENV)/venv.done $(NEXT_VENV)/venv.done:
	$(or $(PYTHON312),$(error $(NO_PYTHON))) -m venv --clear $(@D)
	$(PIP) --upgrade "pip>=25.1"
	@touch $@

$(VENV)/core.done: pyproject.toml | $(VENV)/venv.done
	$(PIP) -e . --group pins
	@touch $@

$(VENV)/test.done: pyproject.toml | $(VENV)/venv.done
	$(PIP) -e . --group test --group lint
	@touch $@ $(VENV)/core.done

$(VENV)/notebooks.done: $(VENV)/test.done
	$(PIP) -e ".[notebooks]" --group test
	@touch $@

$(COMPILE_VENV)/compile.done: pyproject.toml | $(COMPILE_VENV)/venv.done
	$(PIP) -e . --group compile
	@touch $@

$(NEXT_VENV)/compile-next.done: pyproject.toml | $(NEXT_VENV)/venv.done
	$(PIP) -e . --group compile-next
	@touch $@
