# shellcheck shell=bash
# Every environment variable that a run depends on, each with its reason. Sourced by the launch scripts;
# a value that is already set wins.

# Ranks share the cores; more threads per rank only make them wait for each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# One hardware queue: megatron-core counts on collectives and GEMMs starting in the order they were issued,
# which is what lets tensor-parallel communication overlap the work it was put before.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"

# Log lines of several ranks arrive when they are printed.
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED:-1}"

# RUN_DIR is set by the launch scripts: the one run directory of all ranks (recipes/rundir.py reads it).

# FLA_CACHE_MODE and FLA_CONFIG_DIR, the settings of fla's kernels, are set by the recipes (recipes/kernel_settings.py)
# where some were measured for the GPU; a value that is already set wins.
