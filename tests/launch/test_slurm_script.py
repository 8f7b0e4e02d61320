"""launch/slurm.sbatch with stand-ins for SLURM's programs: where ranks meet, and who goes back into the queue."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKES = {
    "scontrol": f"""
case "$1 $2" in
    "show job")
        echo "   PreemptEligibleTime=2030-01-01T00:00:00 PreemptTime=${{PREEMPTED:-None}} Reason=${{REASON:-None}}"
        echo "   Command={ROOT}/launch/slurm.sbatch pretrain a=b"
        ;;
    "show hostnames") [ "$3" = "n[7-8]" ] && printf 'n7\\nn8\\n' ;;
    "show node") echo "   NodeAddr=addr.$3 NodeHostName=$3 Version=22" ;;
    *) echo "$*" >>requeued ;;
esac""",
    # Runs the task of each node, then ends as told.
    "srun": """
case "$*" in *node.sh*) ;; *) exit "${PROBE:-0}" ;; esac
while [ "${1#--}" != "$1" ]; do echo "$1" >>srun_options; shift; done
echo started >>starts
for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" || exit; done
if [ -n "${WARNS:-}" ]; then
    kill -USR1 "$PPID"
    for _ in $(seq 100); do
        [ "$(cat cancelled 2>/dev/null | wc -l)" -gt 1 ] && break
        /bin/sleep 0.2
    done
fi
if [ -n "${GAINS:-}" ]; then mkdir -p "$RUN_DIR/checkpoints/step_$GAINS"; fi
if [ -n "${STOPS:-}" ]; then mkdir -p "$RUN_DIR"; touch "$STOP_MARK"; fi
exit "${CODE:-0}\"""",
    "squeue": 'echo "${STATE:-RUNNING}"',
    "scancel": 'echo "$*" >>cancelled',
    "sleep": "exec /bin/sleep 0.1",
    "python": 'echo "<$*> $RUN_DIR $RUN_JOB $RUN_RESTARTS"',
}  # fmt: skip


def batch(cwd: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of the script, as SLURM does."""
    programs = cwd / "bin"
    programs.mkdir(exist_ok=True)
    for name, body in FAKES.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (programs / name).chmod(0o755)
    copy = shutil.copy(ROOT / "launch" / "slurm.sbatch", cwd / "slurm_script")
    base = {
        "PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(cwd), "PYTHON": str(programs / "python"),
        "CUDA_VISIBLE_DEVICES": "0,1,2", "SLURM_JOB_ID": "40123", "SLURM_JOB_NODELIST": "n[7-8]", "SLURM_NNODES": "2",
        "SLURM_CLUSTER_NAME": "big",
    }  # fmt: skip
    return subprocess.run(
        ["bash", copy, *(arguments or ("pretrain",))], cwd=cwd, env=base | environment, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip


def requeued(cwd: Path) -> list[str]:
    return (cwd / "requeued").read_text().splitlines() if (cwd / "requeued").exists() else []


def test_ranks_meet_at_the_first_node_and_are_numbered_by_the_job(tmp_path: Path):
    hooks = {"SRUN_OPTIONS": "--container-image=x.sqsh --mpi=none", "NODE_PREFIX": "env RUN_JOB=inside"}
    done = batch(tmp_path, "pretrain", "a=b c", **hooks)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("<")]
    for node, line in enumerate(said):
        meeting = f"--nnodes 2 --node-rank {node} --master-addr addr.n7 --master-port 10123 --nproc-per-node 3"
        command = f"<{ROOT}/launch/elastic.py {meeting} -m recipes.pretrain a=b c>"
        assert line == f"{command} outputs/pretrain/slurm-40123 inside 0"
    assert len(said) == 2 and not requeued(tmp_path)
    options = (tmp_path / "srun_options").read_text().splitlines()
    assert {"--ntasks-per-node=1", "--kill-on-bad-exit=1", "--container-image=x.sqsh", "--mpi=none"} <= set(options)


@pytest.mark.parametrize(
    ("arguments", "environment", "run_dir"),
    [
        (("sft",), {}, "outputs/sft/slurm-40123"),
        (("sft",), {"RUN_DIR": "mine"}, "mine"),
        (("sft", "run_dir=a", "run_dir=b b"), {"RUN_DIR": "mine"}, "b b"),
        (("sft",), {"SLURM_ARRAY_JOB_ID": "40120", "SLURM_ARRAY_TASK_ID": "3"}, "outputs/sft/slurm-40120_3"),
    ],
)
def test_one_run_dir_for_all_ranks_and_starts(tmp_path: Path, arguments: tuple, environment: dict, run_dir: str):
    texts = [batch(tmp_path, *arguments, **environment, SLURM_RESTART_COUNT=nth).stdout for nth in ("0", "1")]
    assert all(text.count(f"> {run_dir} slurm:big:40") == 2 for text in texts)
    assert f"run_dir={run_dir}, newest" in texts[0] and texts[1].splitlines()[-1].endswith(" 1")


@pytest.mark.parametrize(
    ("environment", "goes_on", "said"),
    [
        ({"CODE": "0"}, False, ""),
        ({"STOPS": "1", "GAINS": "7"}, True, "requeue: job 40123 stopped with a checkpoint; it goes on after step 7"),
        ({"STOPS": "1", "STATE": "COMPLETING"}, False, "stopped with a checkpoint; SLURM has it as COMPLETING"),
        ({"CODE": "1"}, False, "failed with exit code 1 and gained no checkpoint; not started again"),
        ({"CODE": "143", "PREEMPTED": "2030-01-01"}, True, "failed with exit code 143; it goes on after step 0"),
        ({"CODE": "143", "STATE": "COMPLETING", "REASON": "TimeLimit"}, True, "40123 reached its time limit"),
        ({"CODE": "1", "GAINS": "7"}, True, "failed with exit code 1; it goes on after step 7"),
        ({"CODE": "137", "PROBE": "1"}, True, "requeue: job 40123 lost a node; it goes on after step 0"),
        ({"CODE": "1", "PROBE": "1", "STATE": "PENDING"}, False, "SLURM has it as PENDING"),
    ],
)
def test_who_goes_back_into_the_queue(tmp_path: Path, environment: dict, goes_on: bool, said: str):
    done = batch(tmp_path, "pretrain", **environment)
    assert requeued(tmp_path) == (["requeue 40123"] if goes_on else [])
    assert said in done.stdout + done.stderr
    assert goes_on or done.returncode == int(environment.get("CODE", "0"))


def test_a_task_of_an_array_requeues_itself_alone(tmp_path: Path):
    batch(tmp_path, STOPS="1", GAINS="1", SLURM_ARRAY_JOB_ID="40123", SLURM_ARRAY_TASK_ID="2")
    assert requeued(tmp_path) == ["requeue 40123_2"]


def test_starts_without_a_gain_are_counted_and_a_gain_starts_the_count_again(tmp_path: Path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()

    def start(nth: int, **environment: str) -> str:
        (tmp_path / "starts").unlink(missing_ok=True)
        done = batch(tmp_path, "pretrain", RUN_DIR=str(run_dir), SLURM_RESTART_COUNT=str(nth), **environment)
        return done.stdout + done.stderr

    def ran() -> bool:
        return (tmp_path / "starts").exists()

    # SLURM's own requeues, after a node failure, leave nothing behind but the count.
    for nth in (0, 1):
        assert "error" not in start(nth, CODE="0") and ran()
    assert "goes on after step 5" in start(2, STOPS="1", GAINS="5")
    for nth in (3, 4, 5):
        assert "error" not in start(nth, CODE="0") and ran()
    assert "job 40123: 3 starts in a row gained no checkpoint (the newest is of step 5)" in start(6) and not ran()
    # Another job may go on in the same directory.
    assert "error" not in start(0, SLURM_JOB_ID="40124") and ran()


def test_failures_come_to_an_end_even_where_each_gained(tmp_path: Path):
    ends = []
    for nth in range(12):
        done = batch(
            tmp_path, "pretrain", RUN_DIR="run", CODE="1", GAINS=str(nth + 1), SLURM_RESTART_COUNT=str(nth)
        )
        ends.append("requeue: job" in done.stdout)
    assert ends == [True] * 10 + [False] * 2
    assert "failed with exit code 1, for the 12th time; not started again" in done.stderr


def test_a_sweep_takes_the_line_of_its_task(tmp_path: Path):
    (tmp_path / "sweep").write_text("a=1 b=2\na=3\n")
    task = {"SWEEP": "sweep", "SLURM_ARRAY_JOB_ID": "40120"}
    assert "recipes.pretrain x=y a=3>" in batch(tmp_path, "pretrain", "x=y", **task, SLURM_ARRAY_TASK_ID="2").stdout
    assert "has no line 3" in batch(tmp_path, "pretrain", **task, SLURM_ARRAY_TASK_ID="3").stderr
    alone = batch(tmp_path, "pretrain", SWEEP="sweep")
    assert alone.returncode == 1 and "SWEEP needs sbatch --array=1-<lines>" in alone.stderr


def test_an_unknown_verb_is_refused_before_anything_starts(tmp_path: Path):
    done = batch(tmp_path, "train")
    assert done.returncode == 1 and done.stderr.startswith("error: verb: 'train' is unknown")
    assert not (tmp_path / "starts").exists()


def test_the_batch_shell_passes_the_warning_on_to_the_steps(tmp_path: Path):
    done = batch(tmp_path, WARNS="1", CODE="143")
    cancelled = (tmp_path / "cancelled").read_text().splitlines()
    # Told again for as long as the step goes on.
    assert len(cancelled) > 1 and set(cancelled) == {"--signal=USR1 40123"}
    assert "SIGUSR1, the ranks are asked to stop" in done.stdout
    assert "was asked to stop and ended with exit code 143" in done.stdout and requeued(tmp_path) == ["requeue 40123"]
