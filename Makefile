# SPDX-License-Identifier: Apache-2.0
# Each target sees to all it needs, from Debian packages on; what is done is not done again.
#   PYTHON=python3.12       the interpreter .venv is made from
#   TORCH=2.14.1            another torch, with an environment and a build folder of its own in build/torch-2.14.1
#   TORCH_INDEX_URL=...     where pip takes torch from (PyTorch's index of CPU builds has the small one)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory --no-builtin-rules

export PYTHON ?= python3
ifdef TORCH
  export TORCH
  export LAMINA_VENV := build/torch-$(TORCH)/venv
  BUILD := build/torch-$(TORCH)/release
  DIST := build/torch-$(TORCH)/dist
else
  export LAMINA_VENV := .venv
  BUILD := build/release
  DIST := dist
endif
BIN := $(LAMINA_VENV)/bin
# Part of the Python tests (tests/soak.py), or empty for all of them.
SAMPLE ?= 1
# Whose engines `make wheels` puts into one wheel, besides the default's.
TORCHES ?= 2.14.1 2.15.0

.PHONY: build configure-tests build-tests emulated wheel wheels docs demo test test-torch test-ucx test-tensorflow tensorflow test-debian13 test-pytest test-ctest check unit gpu-check gpu-pack bench soak format lint clean
.DEFAULT_GOAL := build

# Steps that are done leave a stamp: the system's beside the build, the others in what they fill.
SYSTEM := build/.system
VENV := $(LAMINA_VENV)/.lamina-venv
TOOLS := $(LAMINA_VENV)/.lamina-tools
DOCS := $(LAMINA_VENV)/.lamina-docs
PACKAGE := $(BUILD)/.installed
SYSTEM_OF_TESTS := build/.system-tests
WITH_TESTS := $(BUILD)/.with-tests

$(SYSTEM): scripts/system.sh
	@scripts/system.sh
	@mkdir -p $(@D) && touch $@

$(SYSTEM_OF_TESTS): scripts/system.sh
	@scripts/system.sh tests
	@mkdir -p $(@D) && touch $@

$(VENV): requirements.txt scripts/venv.sh | $(SYSTEM)
	@scripts/venv.sh
	@touch $@

$(TOOLS): requirements-dev.txt $(VENV)
	@$(BIN)/python -m pip --disable-pip-version-check install -q -r requirements-dev.txt </dev/null
	@touch $@

$(DOCS): requirements-docs.txt $(VENV)
	@$(BIN)/python -m pip --disable-pip-version-check install -q -r requirements-docs.txt </dev/null
	@touch $@

# All that the package is made of. The list itself is kept, so that a new or removed file is noticed; what an installed
# Python file holds is that file.
SOURCES := $(sort $(shell find CMakeLists.txt VERSION README.md LICENSE pyproject.toml cmake lamina apps python scripts/package.sh \
  -type f -not -path '*/__pycache__*' -not -name _lamina.pyi 2>/dev/null))
LIST := build/.sources
ifneq ($(SOURCES),$(file <$(LIST)))
  $(shell mkdir -p build)
  $(file >$(LIST),$(SOURCES))
endif

$(PACKAGE): $(filter-out python/%.py python/%.pyi,$(SOURCES)) $(LIST) $(VENV)
	@scripts/package.sh $(BUILD)
	@touch $@

build: $(PACKAGE)

# Targets of tests and benchmarks in the build folder, not yet built.
configure-tests: $(WITH_TESTS)

$(WITH_TESTS): $(SYSTEM_OF_TESTS) | $(PACKAGE)
	@cmake -S . -B $(BUILD) -DLAMINA_TESTS=ON >/dev/null
	@touch $@

demo: build
	@$(BIN)/lamina run -n 2 examples/train_gpt.py --steps 150

# The documents as a site in build/docs; broken links, pages that nothing leads to and other warnings are errors.
docs: build $(DOCS)
	@$(BIN)/sphinx-build -q -W --keep-going -c docs/site -d build/docs-cache . build/docs
	@echo "The documents are in build/docs: open build/docs/index.html"

wheel: build $(TOOLS)
	@scripts/wheel.sh $(BUILD) $(DIST)

wheels: build $(TOOLS)
	@for torch in $(TORCHES); do $(MAKE) wheel TORCH=$$torch; done
	@scripts/wheel.sh $(BUILD) $(DIST) $(TORCHES:%=build/torch-%/dist/lamina-*.whl)

# The emulated accelerator alone, in build/emulated.
emulated: $(WITH_TESTS)
	@cmake --build $(BUILD) --target _emulated -j $$(scripts/jobs.sh)

build-tests: build $(TOOLS) $(WITH_TESTS)
	@cmake --build $(BUILD) --target tests -j $$(scripts/jobs.sh)

# TensorFlow in an environment of its own, beside all that .venv has, and the library of operators for it. Its tests.
tensorflow: build
	@scripts/tensorflow.sh $(BUILD)

test-tensorflow: tensorflow $(TOOLS)
	@build/tensorflow/venv/bin/python -m pytest tests/tensorflow $(PYTEST_ARGS)

# Both halves run whatever the other says, and at the same time: one computes while the other waits, and so do the workers
# of pytest, one more than there are cores. ctest's lines come when it has ended. What make tells its children is not for
# those of tests. Of each half the slowest are printed; the time of a job of cases is its first case's.
test: build-tests
	@failed=0; \
	$(MAKE) --keep-going -j2 test-pytest test-ctest || failed=1; \
	echo "The slowest C++ tests:"; \
	sed -nE 's/^ *[0-9]+\/[0-9]+ Test +#[0-9]+: ([^ ]+) .* ([0-9.]+) sec.*/\2 s \1/p' $(BUILD)/ctest.log | sort -rn | head -10; \
	echo "All tests took $$((SECONDS / 60)) min $$((SECONDS % 60)) s."; \
	exit $$failed

# In a Debian 13 of its own, what STEPS names.
STEPS ?= demo test
test-debian13:
	@scripts/debian13.sh $(STEPS)

# All tests with the UCX of PyPI in the place of the system's; afterwards `make test` has a few of them.
test-ucx: export SAMPLE =
test-ucx: export LAMINA_UCX = $(CURDIR)/build/ucx/libucx/lib
test-ucx: build/ucx test

build/ucx:
	@$(BIN)/python -m pip install --quiet --no-deps --target $@ libucx-cu12==1.22.0

test-torch: export SAMPLE =
test-torch: $(if $(TORCH),test)
	@[[ -n "$(TORCH)" ]] || { echo "say which: make test-torch TORCH=2.14.1"; exit 1; }

test-pytest:
	@env -u MAKEFLAGS LAMINA_SAMPLE=$(SAMPLE) $(BIN)/pytest -n $$(($$(scripts/jobs.sh) + 1)) --durations=20 --durations-min=5 $(PYTEST_ARGS)

test-ctest:
	@failed=0; \
	left=$(if $(SAMPLE),$$(ctest --test-dir $(BUILD) -N | $(BIN)/python tests/soak.py)); \
	env -u MAKEFLAGS ctest --test-dir $(BUILD) --output-on-failure --no-tests=error -j $$(scripts/jobs.sh) $${left:+-E "$$left"} \
	  </dev/null >$(BUILD)/ctest.log 2>&1 || failed=1; \
	cat $(BUILD)/ctest.log; \
	exit $$failed

# What needs no ranks, in a minute.
check: lint unit

unit: build $(TOOLS) $(WITH_TESTS)
	@cmake --build $(BUILD) --target unit_tests -j $$(scripts/jobs.sh)
	@ctest --test-dir $(BUILD) --output-on-failure --no-tests=error -L unit -j $$(scripts/jobs.sh)
	@$(BIN)/pytest -q -m unit -n $$(scripts/jobs.sh) $(PYTEST_ARGS)

# On a machine with an accelerator, of which no more is asked than torch and compilers: only the emulated one is made before.
gpu-check: $(if $(filter emulated,$(LAMINA_DEVICE)),emulated)
	@scripts/gpu_check.sh $(STAGES)

# What such a machine lacks, in build/gpu-pack.
gpu-pack: build
	@scripts/gpu_pack.sh

bench: build $(WITH_TESTS)
	@cmake --build $(BUILD) --target bench_programs
	@$(BIN)/python benchmarks/run.py

soak: build-tests
	@LAMINA_SOAK=1 ctest --test-dir $(BUILD) --output-on-failure --no-tests=error
	@LAMINA_SOAK=1 $(BIN)/pytest $(PYTEST_ARGS)

CXX_FILES = $(shell git ls-files -co --exclude-standard '*.h' '*.cc')

format: $(TOOLS)
	@$(BIN)/clang-format -i $(CXX_FILES)
	@$(BIN)/ruff check -q --fix --exit-zero
	@$(BIN)/ruff format

# clang-tidy sees the folders without torch: those it reads in seconds.
lint: $(TOOLS)
	@bare=$$(git ls-files '*.h' '*.cc' '*.py' '*.pyi' '*.sh' '*.cmake' '*CMakeLists.txt' | xargs grep -L SPDX-License-Identifier || true); \
	if [[ -n "$$bare" ]]; then echo "without an SPDX line: $$bare"; exit 1; fi
	@$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/python scripts/check_layers.py
	@$(BIN)/python scripts/check_devices.py
	@$(BIN)/python scripts/check_python_layers.py
	@$(BIN)/python scripts/check_globals.py
	@$(BIN)/python scripts/check_comments.py
	@$(BIN)/python scripts/check_notes.py
	@$(BIN)/python scripts/check_functions.py
	@$(BIN)/python scripts/check_lines.py
	@$(BIN)/python scripts/check_type_names.py
	@$(BIN)/python scripts/check_texts.py
	@$(BIN)/python scripts/check_outside.py
	@cmake -S . -B build/lint -G Ninja -DLAMINA_TORCH=OFF -DLAMINA_TESTS=OFF -DLAMINA_BATCH=OFF -DCMAKE_BUILD_TYPE=Debug >build/lint.log \
	  || { cat build/lint.log; exit 1; }
	@$(BIN)/python scripts/clang_tidy.py build/lint

clean:
	@rm -rf build
