"""The shipped batch script on a real SLURM of two virtual nodes: make test-slurm."""

import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.sinks import run_id
from tests.logs.wandb_file import read_offline_run
from tests.slurm.cluster import Cluster, wait_for

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "launch" / "slurm.sbatch")
# One rank a node: two cores must do for all. The steps are small, and many enough for a signal to meet them.
OVERRIDES = (
    "model=tiny", "data.seq_tokens=64", "data.vocab_size=300", "train.tokens_per_step=512", "mtp.loss_scale=0.3",
    "train.microbatch_tokens=128", "model.architecture.vocab_size=512", "train.log_every=1", "log.wandb=offline",
)  # fmt: skip
STEPS = 24
JOB_LIMIT_S = 150.0
OWN_OF_WANDB = {"train/step", "_step", "_runtime", "_timestamp"}

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Not pytest's own folder: a socket's path has a limit of about 100 characters.
    base = Path(tempfile.mkdtemp(prefix="slurm-"))
    with Cluster(base) as running:
        yield running
    shutil.rmtree(base)


def submit(cluster: Cluster, run_dir: Path, *arguments: str, options: tuple[str, ...] = (), **environment: str) -> str:
    variables = {"RUN_DIR": str(run_dir), "NPROC": "1", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return cluster.submit(*options, SCRIPT, *arguments, **variables | environment)


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def losses(run_dir: Path) -> list[tuple[int, float, float, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["train/lm_loss"], row["mtp/loss_depth1"], row["train/grad_norm"]) for row in rows]


def write_text(path: Path) -> Path:
    words = random.Random(0)
    lines = [{"text": " ".join(str(words.randrange(100)) for _ in range(40))} for _ in range(200)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def meet_time_limit(cluster: Cluster, job: str, warning: str, nth: int) -> None:
    """Bring the limit near, a minute away and at most two, and wait for SLURM's warning, due 110 s before it.

    SLURM looks every 30 s, and the ranks must not be done by then.
    """
    ranks = cluster.ranks()
    assert len(ranks) == 2
    for rank in ranks:
        rank.suspend()
    runs_s = time.time() - time.mktime(time.strptime(cluster.job(job)["StartTime"], "%Y-%m-%dT%H:%M:%S"))
    cluster.run("scontrol", "update", f"jobid={job}", f"timelimit={int(runs_s // 60) + 2}")
    wait_for(lambda: cluster.output(job).count(warning) == nth, 90, warning, lambda: cluster.output(job))
    for rank in ranks:
        rank.resume()


def check_wandb(run_dir: Path, n_whole_starts: int) -> None:
    """Every series of the last starts, no step twice; a start that crashed before them may have left nothing."""
    files = sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda file: file.parent.name)
    runs = [read_offline_run(file) for file in files[-n_whole_starts:]]
    rows = [row for run in runs for row in run.history]
    assert {run.run_id for run in runs} == {run_id(run_dir)} and all(run.is_complete for run in runs)
    assert [row["train/step"] for row in rows] == [row["_step"] for row in rows] == list(range(1, STEPS + 1))
    names = {key for line in (run_dir / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)}
    assert names - {"step"} == {key for row in rows for key in row} - OWN_OF_WANDB


def test_a_run_survives_node_failure_preemption_and_its_time_limit(cluster: Cluster, tmp_path: Path):
    """Three ends and four starts, and the numbers of a run that nothing ever ended."""
    run_dir, straight = tmp_path / "run", tmp_path / "straight"
    common = ("pretrain", *OVERRIDES, f"train.steps={STEPS}", f"data.path={write_text(tmp_path / 'text.jsonl')}")

    def at_step(job: str, step: int) -> None:
        wait_for(lambda: steps_done(run_dir) >= step, JOB_LIMIT_S, f"step {step}", lambda: cluster.output(job))

    def at_start(job: str, nth: int) -> None:
        wait_for(lambda: f"start {nth} on " in cluster.output(job), 60, f"start {nth}", lambda: cluster.output(job))

    job = submit(cluster, run_dir, *common, options=("--signal=B:USR1@110",))
    at_step(job, 2)
    # Before the first checkpoint: the next start begins again in the same directory.
    cluster.lose_node("n1")
    at_start(job, 2)
    assert not (run_dir / "checkpoints").exists()

    # The file of the first start is there until the second has taken its place.
    first = f"step 1/{STEPS} "
    wait_for(lambda: cluster.output(job).count(first) == 2, JOB_LIMIT_S, "restart", lambda: cluster.output(job))
    assert "starts again at step 0" in cluster.output(job)
    at_step(job, 3)
    urgent = cluster.submit(
        "--partition=high", "--nodes=2", "--exclusive", "--mem=0", "--wrap", "srun --ntasks-per-node=1 true"
    )
    cluster.wait_state(urgent, "COMPLETED", 90)
    at_start(job, 3)
    first_stop = steps_done(run_dir)
    assert [path.name for path in (run_dir / "checkpoints").glob("step_*")] == [f"step_{first_stop}"]

    at_step(job, first_stop + 1)
    meet_time_limit(cluster, job, "asked to stop", 2)
    at_start(job, 4)
    second_stop = steps_done(run_dir)
    assert first_stop < second_stop < STEPS
    cluster.run("scontrol", "update", f"jobid={job}", "timelimit=60")
    ended = cluster.wait_state(job, "COMPLETED", JOB_LIMIT_S)
    assert ended["ExitCode"] == "0:0" and ended["Restarts"] == "3"
    text = cluster.output(job)
    assert text.count("the same run_dir goes on from there") == text.count("requeue: job") == 2
    assert f"continues after step {first_stop} of" in text and f"continues after step {second_stop} of" in text

    check_wandb(run_dir, n_whole_starts=3)

    whole = submit(cluster, straight, *common)
    cluster.wait_state(whole, "COMPLETED", JOB_LIMIT_S)
    assert [row[0] for row in losses(straight)] == list(range(1, STEPS + 1))
    assert losses(run_dir) == losses(straight)


def test_a_mistake_is_told_once_and_not_started_again(cluster: Cluster, tmp_path: Path):
    job = submit(cluster, tmp_path / "run", "pretrain", "experiment=demo", "mtp.loss_scale=0")
    ended = cluster.wait_state(job, "FAILED", JOB_LIMIT_S)
    text = cluster.output(job)
    # Of 1, and 143 of the node that SLURM ended when the first had failed, srun gives the larger.
    assert ended["ExitCode"] in ("1:0", "143:0") and ended["Restarts"] == "0"
    assert text.count("error: mtp.loss_scale: 0 is not allowed") == 1
    assert "and gained no checkpoint; not started again" in text
    assert not (tmp_path / "run").exists()


def stand_in(path: Path, body: str) -> str:
    """An interpreter that does not train: the scheduler cannot tell."""
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_a_cancelled_job_saves_and_stays_cancelled(cluster: Cluster, tmp_path: Path):
    trap = f'trap \'touch "$STOP_MARK" {tmp_path}/stopped; exit 0\' TERM USR1'
    python = stand_in(tmp_path / "python", f'{trap}\nmkdir -p "$RUN_DIR"; echo ready\nwhile :; do sleep 0.1; done')
    job = submit(cluster, tmp_path / "run", "pretrain", PYTHON=python)
    wait_for(lambda: cluster.output(job).count("ready") == 2, 60, "ranks", lambda: cluster.output(job))
    cluster.run("scancel", job)
    wait_for(lambda: "SLURM has it as" in cluster.output(job), 60, "end", lambda: cluster.output(job))
    assert (tmp_path / "stopped").exists()
    wait_for(lambda: set(cluster.states().values()) == {"idle"}, 60, "idle nodes")
    ended = cluster.job(job)
    assert ended["JobState"] == "CANCELLED" and ended["Restarts"] == "0"


def test_each_task_of_an_array_takes_its_line(cluster: Cluster, tmp_path: Path):
    (tmp_path / "sweep").write_text("optim.lr=1e-3 seed=1\noptim.lr=1e-4\n")
    python = stand_in(tmp_path / "python", 'echo "<$*> in $RUN_DIR of $RUN_JOB by $MASTER_ADDR:$MASTER_PORT"')
    job = submit(
        cluster, tmp_path / "unused", "pretrain", "a=b", options=("--array=1-2", "--nodes=1"), PYTHON=python,
        SWEEP=str(tmp_path / "sweep"), RUN_DIR="",
    )  # fmt: skip
    wait_for(lambda: not cluster.run("squeue", "-h", "-j", job), 90, "end of the array")
    texts = [path.read_text() for path in cluster.base.glob("*.out") if "recipes.pretrain a=b" in path.read_text()]
    said = [line for text in texts for line in text.splitlines() if line.startswith("<")]
    ends = sorted(line.split("-m recipes.pretrain ")[1].split(" of ")[0] for line in said)
    assert ends == [
        f"a=b optim.lr=1e-3 seed=1> in outputs/pretrain/slurm-{job}_1",
        f"a=b optim.lr=1e-4> in outputs/pretrain/slurm-{job}_2",
    ]
    assert len({line.rpartition(":")[2] for line in said}) == 2 and all("by 127.0.0.1:" in line for line in said)


def test_the_cluster_leaves_nothing(cluster: Cluster):
    """Keep this one last: it takes the cluster down."""
    cluster.__exit__(None, None, None)
    assert not cluster._of_this_cluster() and os.path.isdir(cluster.base)
