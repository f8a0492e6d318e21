# Works with GNU make 3.81 (macOS) and later. Nothing is needed beforehand but Python 3.10 with venv.

PYTHON ?= python3
VENV = .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed

# What pip installs beside minizero. At a site with its own MPI leave `mpi` out: `make setup EXTRAS=lessons,test`.
# The choice is kept in the stamp, so later targets do not undo it.
DEFAULT_EXTRAS = mpi,lessons,test
EXTRAS ?= $(or $(shell cat $(STAMP) 2>/dev/null),$(DEFAULT_EXTRAS))

MPIRUN = mpirun
LESSON = 03
N = 8
ARGS =
PICTURED = 01 02 03 04 05
SCRIPT = $(firstword $(wildcard lessons/$(LESSON)_*.py lessons/0$(LESSON)_*.py lessons/$(LESSON).py))

# Open MPI refuses to start as root, and more ranks than cores, unless told otherwise. Other MPIs ignore these.
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export PRTE_MCA_rmaps_default_mapping_policy = :oversubscribe

.PHONY: help setup lesson pictures test gpu-check lint clean

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

setup:  ## make .venv and install into it; at a site with its own MPI: EXTRAS=lessons,test
	@rm -f $(STAMP)
	@$(MAKE) --no-print-directory $(STAMP) EXTRAS='$(EXTRAS)'

lesson: $(STAMP)  ## run a lesson on N ranks: LESSON=03 N=8 ARGS=
	@test -n "$(SCRIPT)" || { echo "There is no lessons/$(LESSON)_*.py. Choose LESSON= from:"; ls lessons/[0-9]*.py; exit 1; }
	@case "$(N)" in ""|0|*[!0-9]*) echo "N=$(N) is not a number of ranks: make lesson N=8"; exit 1;; esac
	@PATH="$$(cd $(BIN) && pwd):$$PATH"; export PATH; \
	command -v $(firstword $(MPIRUN)) >/dev/null || { \
	    echo "There is no $(firstword $(MPIRUN)) on PATH. Load your site's MPI (module load ...), or install one here:"; \
	    echo "  make setup EXTRAS=$(DEFAULT_EXTRAS)"; exit 1; }; \
	echo "$(MPIRUN) -n $(N) python $(SCRIPT) $(ARGS)"; \
	$(MPIRUN) -n $(N) python $(SCRIPT) $(ARGS)

pictures: $(STAMP)  ## remake the pictures in the lessons' texts, on 8 ranks
	@for lesson in $(PICTURED); do \
	    $(MAKE) --no-print-directory lesson LESSON=$$lesson N=8 ARGS="--plot lessons/pictures/$$lesson" || exit 1; \
	done

test: lint  ## lint, then run every test; ARGS= goes to pytest, as in ARGS='-k zero2'
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)  # two files at a time

gpu-check:  ## on a machine with a GPU: are bits, memory and speed as they should be? In under 5 minutes
	@$(firstword $(wildcard $(BIN)/python) $(PYTHON)) tests/gpu_check.py $(ARGS)

lint: $(STAMP)  ## ruff, mypy, and whether the lessons still quote the code as it is
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python lessons/quote.py --check --no-run  # without --no-run: what the programs print, too, in a minute

clean:  ## remove .venv and everything else that was generated
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	    echo "There is no $(PYTHON) on PATH. Install Python 3.10 or later, or name one: make setup PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "minizero needs Python 3.10 or later, and this is $$($(PYTHON) --version 2>&1)."; \
	    echo "Name a newer one: make setup PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	    echo "$(PYTHON) cannot make virtual environments: its venv module is missing."; \
	    echo "Debian and Ubuntu: apt install python3-venv. Or name another Python: make setup PYTHON=/path/to/python3"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing minizero[$(EXTRAS)] into $(VENV) (a minute or so)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=23'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	@echo '$(EXTRAS)' > $(STAMP)
