# shellcheck shell=bash
# Every environment variable that a run depends on, each with its reason. Sourced by the launch scripts;
# a value that is already set wins.

# Ranks share the cores; more threads per rank only make them wait for each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# One hardware queue: megatron-core counts on collectives and GEMMs starting in the order they were issued,
# which is what lets tensor-parallel communication overlap the work it was put before.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"

# Collectives in CUDA graphs have communicators of their own (ParallelContext.for_graphs), so that NCCL need not guard
# every one of them against eager launches on the same communicator, which takes longer than a small sum itself.
export NCCL_GRAPH_MIXING_SUPPORT="${NCCL_GRAPH_MIXING_SUPPORT:-0}"

# Log lines of several ranks arrive when they are printed.
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED:-1}"

# Given by the user, read by the launch scripts:
#   PYTHON        interpreter, for a machine or a container whose own Python holds everything
#   NPROC         ranks a node, where it is not the number of visible GPUs (CUDA_VISIBLE_DEVICES, else nvidia-smi)
#   CONSTRAINTS   file of pinned versions for install.sh, such as launch/constraints-h200.txt
#   MEASURE_DIR   where measure.sh writes, if not outputs/measure/<timestamp>
#   SWEEP         file of overrides, a line for each task of a job array
#   SRUN_OPTIONS  options for srun, such as those of its container plugin
#   NODE_PREFIX   words before the command of each node, such as a container's exec
#
# Set by the launch scripts, read by the ranks (recipes/rundir.py, recipes/ranks.py) and the launcher:
#   RUN_DIR       the one run directory of all ranks and all starts: each rank's own clock would give several
#   RUN_JOB       the job that this start belongs to: a run directory may be used again only by the job that made it
#   RUN_RESTARTS  earlier starts of that job: at 0 even its own directory is not used again
#   STOP_MARK     file by which launchers on several nodes tell a stop: exit codes that differ look like a failure
#   MASTER_ADDR, MASTER_PORT  where the ranks of several nodes meet
#   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE  torchrun's own: a rank's place
#
# Set by SLURM, read by slurm.sbatch and node.sh:
#   SLURM_JOB_ID, SLURM_ARRAY_JOB_ID, SLURM_ARRAY_TASK_ID, SLURM_CLUSTER_NAME  names of the job and its task
#   SLURM_RESTART_COUNT  earlier starts
#   SLURM_JOB_NODELIST, SLURM_NNODES, SLURM_NODEID  the nodes, and this one's place among them
#
# Set by the recipes (recipes/kernel_settings.py) where settings of fla's kernels were measured for the GPU:
#   FLA_CACHE_MODE, FLA_CONFIG_DIR
