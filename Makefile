VENV ?= .venv
# An interpreter that already holds everything: PYTHON=python3 make test-gpu installs nothing.
PYTHON ?=

ifeq ($(PYTHON),)
PY := $(abspath $(VENV))/bin/python
ENSURE := install
else
PY := $(PYTHON)
ENSURE :=
endif

SCRIPTS := $(wildcard launch/*.sh) launch/slurm.sbatch tests/slurm/run.sh .ci/run

.DEFAULT_GOAL := help
.PHONY: help install demo test test-gpu test-sanitize test-slurm bench lint

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

install: ## virtual environment in VENV (.venv) with everything: 5.5 GB, 3 to 6 minutes, once
	@launch/install.sh $(abspath $(VENV))

demo: $(ENSURE) ## the whole story on two CPU processes: pretrain a tiny model, grpo with speculation, before and after
	@PYTHON=$(PY) launch/demo.sh $(ARGS)

test: $(ENSURE) ## the CPU test suite; ARGS="-k name" goes to pytest
	OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(PY) -m pytest -m "not gpu and not slurm" -q $(ARGS)

test-gpu: $(ENSURE) ## the tests that need a CUDA device
	OMP_NUM_THREADS=1 $(PY) -m pytest -m gpu -q $(ARGS)

test-sanitize: $(ENSURE) ## every own kernel under compute-sanitizer's memcheck and racecheck
	OMP_NUM_THREADS=1 $(PY) -m tests.gpu.sanitize
	@# torch's allocator would hide reads past the end of a tensor.
	@for tool in memcheck racecheck; do PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
	  compute-sanitizer --tool $$tool --error-exitcode 9 $(PY) -m tests.gpu.sanitize || exit 1; done

test-slurm: $(ENSURE) ## launch/slurm.sbatch on a small SLURM of its own; as root on Debian, else skipped
	@tests/slurm/run.sh $(PY) $(ARGS)

bench: $(ENSURE) ## decode kernels and the passes of a step on one GPU, against the bytes they move
	OMP_NUM_THREADS=1 $(PY) -m recipes.benchmark what=kernels $(ARGS)

lint: $(ENSURE) ## ruff, and the shell scripts
	$(PY) -m ruff check .
	@for script in $(SCRIPTS); do bash -n $$script || exit 1; done
	@if command -v shellcheck >/dev/null; then shellcheck $(SCRIPTS); else echo "shellcheck is not installed: skipped"; fi
