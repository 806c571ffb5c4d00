# make demo: the main job on four processes of this machine; make test: the whole suite.
# A fresh machine needs Python 3.11 or later and nothing else; the first target that is made sets up .venv.

VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready

export OMP_NUM_THREADS ?= 1
# Bounds of the fault tests are stretched by this, for machines that do other things too; `make faults` keeps to them.
export XPAR_TEST_SLACK ?= 3

.PHONY: venv demo test coverage faults raises lint format bench clean

venv: $(READY)

demo: $(READY)
	TRANSFORMERS_VERBOSITY=error $(VENV)/bin/torchrun --standalone --nproc_per_node=4 examples/flux.py --ulysses_degree 2 --pipefusion_degree 2

test: $(READY)
	$(PYTHON) -m pytest

coverage: $(READY)
	$(PYTHON) -m pytest -m coverage --timeout 900

# The fault matrix inside its bounds, on an idle machine; one line of times for each row.
faults: $(READY)
	rm -f out/faults.txt; mkdir -p out
	XPAR_TEST_SLACK=1 XPAR_FAULT_TIMES=out/faults.txt $(PYTHON) -m pytest tests/faults

# Which raise statements no test reaches; ranks write coverage data of their own.
raises: $(READY)
	rm -f .coverage .coverage.*
	$(PYTHON) -m coverage run -m pytest --timeout 900 || true
	$(PYTHON) -m tests.raise_coverage

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format: $(READY)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

bench: $(READY)
	$(PYTHON) benchmarks/speed.py

# Made anew when a pin changes. The first Python that runs and is new enough is taken: a version manager's shim may
# be on the path without a version behind it.
$(READY): requirements/ci.txt setup.py
	@if ! $(PYTHON) -c '' 2>/dev/null; then \
	  for python in $(PYTHON3) python3.11 python3.12 python3.13 python3; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      echo "making $(VENV) with $$python"; $$python -m venv $(VENV) || exit 1; break; \
	    fi; \
	  done; \
	fi
	@$(PYTHON) -c '' || { echo "no Python >= 3.11 found; install one or say make PYTHON3=/path/to/python3"; exit 1; }
	$(PYTHON) -m pip install "$$(grep '^torch==' requirements/ci.txt)"
	$(PYTHON) -m pip install -r requirements/ci.txt
	$(PYTHON) -m pip install --no-deps --no-build-isolation -e .
	touch $(READY)

clean:
	rm -rf $(VENV) build out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
