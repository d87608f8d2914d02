# `make demo` and `make test` set up everything themselves, in a .venv of their own.

# The Python that .venv is made from: 3.11 where there is one, because triton-ascend 3.2.0 has no
# wheels for later ones (the tests that need it are then skipped).
BASE_PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# The Python of a machine with a GPU, whose torch and Triton drive it: `make test-gpu`, `make bench`.
PYTHON ?= python3
# More arguments for pytest or the benchmark: make test-gpu ARGS="-n 8".
ARGS ?=
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
JOBS ?= auto

.PHONY: demo test test-gpu zoo ascend-sweep bench lint setup clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: lint
	ASCEND_LN_FUSE_STRICT=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests

lint: $(READY)
	$(BIN)/ruff check .

# The numerics of every kernel shape on an NVIDIA GPU; skipped, with a message, where there is none.
test-gpu: build/gpu-site
	ASCEND_LN_FUSE_STRICT=1 PYTHONPATH=build/gpu-site $(PYTHON) -m pytest -q $(ARGS) tests/gpu

# Every model of transformers and diffusers that can be built offline, compared with eager; goes on where it was
# stopped. ARGS="--write" rewrites its part of docs/reliability.md.
zoo: $(READY)
	$(BIN)/python tests/models/zoo/zoo.py $(ARGS)

# Every kernel of the grid through Ascend's compilers and the interpreter, anew; rewrites docs/ascend.md's table.
ascend-sweep: $(READY)
	$(BIN)/python tests/ascend/grid.py $(ARGS)

# Random programs against eager; any number: make fuzz ARGS="--graphs 20000 --seed 1".
.PHONY: fuzz opinfo traps
fuzz: $(READY)
	nice -n 10 $(BIN)/python tests/fuzz/run.py $(ARGS)

# PyTorch's OpInfo samples of the norms, and the list of traps: both rewrite their section of docs/reliability.md.
opinfo: $(READY)
	$(BIN)/python tests/opinfo/samples.py

traps: $(READY)
	$(BIN)/python tests/traps.py

bench: build/gpu-site
	PYTHONPATH=build/gpu-site $(PYTHON) benchmarks/strided_norm.py $(ARGS)

# Whole models, eager, torch.compile and ours, on an NVIDIA GPU; goes on where it was stopped. Libraries that lie
# elsewhere: PYTHONPATH=folder make bench-models. ARGS="--first-calls": compile times at the published depth.
# ARGS="--show --write" measures nothing and rewrites docs/performance.md's section.
.PHONY: bench-models
bench-models: build/gpu-site
	PYTHONPATH=build/gpu-site$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m benchmarks.models \
	    --json build/models.json --plot build/models.svg $(ARGS)

# Made anew each time: it must be this checkout.
.PHONY: build/gpu-site
build/gpu-site:
	rm -rf $@ build/lib build/bdist.*
	$(PYTHON) -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --no-index \
	    --target $@ .

setup: $(READY)

# Where torch comes as a CUDA build, it brings upstream Triton, which writes into the same folder as
# triton-ascend: take it out again, and put triton-ascend's own files back.
$(READY): pyproject.toml requirements.txt
	@test -n "$(BASE_PYTHON)" || { echo "Python 3.11 or later is needed: make BASE_PYTHON=..."; exit 1; }
	rm -rf $(VENV)
	$(BASE_PYTHON) -m venv $(VENV)
	$(PIP) install -r requirements.txt
	@if $(PIP) show triton-ascend >/dev/null 2>&1 && $(PIP) show triton >/dev/null 2>&1; then \
	    $(PIP) uninstall -y triton; \
	    $(PIP) install --force-reinstall --no-deps "$$(grep -o '^triton-ascend==[^ ;]*' requirements.txt)"; \
	fi
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
