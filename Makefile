# make demo and make test do all their set-up themselves, in a .venv of their own.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= auto

.PHONY: demo test test-gpu lint bench clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/ruff check .
	ASCEND_LN_FUSE_STRICT=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests

# Uses the Python of the machine (PYTHON=...), whose torch and Triton drive its GPU.
test-gpu:
	$(PYTHON) -m pip install --quiet --no-deps --no-build-isolation --no-index --upgrade \
	    --target build/gpu-site .
	ASCEND_LN_FUSE_STRICT=1 PYTHONPATH=build/gpu-site $(PYTHON) -m pytest tests/gpu

lint: $(READY)
	$(BIN)/ruff check .

$(READY): pyproject.toml requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(READY)

clean:
	rm -rf $(VENV) build *.egg-info
