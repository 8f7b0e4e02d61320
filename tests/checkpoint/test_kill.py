"""Whatever dies, and whenever: the last complete checkpoint stays, and a run continues from it."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from bailing_mtp.weights.sharded import save
from bailing_mtp.weights.sharded.manifest import check_files, verify
from bailing_mtp.weights.sharded.save import CheckpointSaver, Stored, complete_checkpoints
from tests.distributed.worlds import layout

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SETTINGS = (
    "model=tiny", "data.seq_tokens=64", "data.vocab_size=300", "train.tokens_per_step=256", "train.steps=6",
    "train.microbatch_tokens=128", "mtp.loss_scale=0.3", "log.wandb=disabled", "checkpoint.save_every=2",
    "checkpoint.keep=1", "model.architecture.vocab_size=512",
)  # fmt: skip


def start(command: tuple[str, ...], *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(
        [*command, *SETTINGS, *overrides], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_rank_killed_while_saving_loses_nothing(tmp_path: Path) -> None:
    """Two ranks die in the save after step 4; one rank then continues after step 2, in another layout."""
    words = random.Random(0)
    lines = [{"text": " ".join(str(words.randrange(100)) for _ in range(40))} for _ in range(60)]
    data, run_dir = tmp_path / "text.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = (f"run_dir={run_dir}", f"data.path={data}", "log.wandb=offline")
    killed = start(
        (*LAUNCHER, "-m", "tests.checkpoint.killed"), *common, "parallel.tp=2", "parallel.ep=2", KILL_RANK="1"
    )
    assert killed.returncode != 0
    # Of two ranks one logs.
    (logged,) = (run_dir / "wandb").glob("offline-run-*")
    root = run_dir / "checkpoints"
    left = sorted(path.name for path in root.iterdir()) if root.exists() else []
    assert left == [".step_4.partial", "latest", "step_2"], killed.stderr[-3000:]
    assert (root / "latest").read_text() == "step_2\n"
    verify(root / "step_2")
    resumed = start((sys.executable, "-m", "recipes.pretrain"), *common)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert f"continues after step 2 of {root}/step_2" in resumed.stdout
    assert f"recipes.convert source={root}/step_6 target=<dir> format=hf" in resumed.stdout
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step_6"]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    both = sorted((run_dir / "wandb").glob("offline-run-*"))
    assert logged in both and len(both) == 2 and len({path.name.rpartition("-")[2] for path in both}) == 1
    assert all(row["time/checkpoint_stall_s"] > 0 for row in rows if row["step"] == 6)


class Killed(BaseException):
    """Stands for the process being gone: nothing handles it."""


def store(saver: CheckpointSaver, step: int) -> None:
    tensor = torch.full((4, 3), float(step))
    saver.start(step, [Stored("w", (4, 3), (0, 0), tensor)], lambda directory: None)
    # Training goes on at once: what is stored is what was there when the save began.
    tensor.zero_()
    saver.poll(block=True)


def moments() -> list[tuple[str, Callable[[], mock._patch]]]:
    """Calls of the commit before which the process dies, in their order."""

    def before(owner: object, name: str, nth: int) -> Callable[[], mock._patch]:
        real, calls = getattr(owner, name), []

        def dies(*arguments: object, **options: object) -> object:
            calls.append(arguments)
            if len(calls) == nth:
                raise Killed
            return real(*arguments, **options)

        return lambda: mock.patch.object(owner, name, dies)

    return [
        ("before the index", before(save, "write_index", 1)),
        ("before the manifest", before(save, "write_manifest", 1)),
        ("after the manifest", before(CheckpointSaver, "_publish", 1)),
        ("before the pointer", before(save, "write_durably", 1)),
        ("before pruning", before(save, "complete_checkpoints", 1)),
        ("before deleting", before(save.shutil, "rmtree", 1)),
    ]


@pytest.mark.parametrize(("moment", "patched"), moments(), ids=[name for name, _ in moments()])
def test_killed_at_any_moment_of_the_commit(tmp_path: Path, moment: str, patched: Callable[[], mock._patch]) -> None:
    with layout(tp=1, ep=1) as context:
        store(CheckpointSaver(tmp_path, context, keep=1), 1)
        with patched(), pytest.raises(Killed):
            store(CheckpointSaver(tmp_path, context, keep=1), 2)
        complete = complete_checkpoints(tmp_path)
        assert complete and complete[-1].name == ("step_1" if "index" in moment or "manifest" in moment else "step_2")
        for directory in complete:
            check_files(directory)
            verify(directory)
        store(CheckpointSaver(tmp_path, context, keep=1), 3)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_3"]


def test_what_is_stored_is_what_was_there_when_the_save_began(tmp_path: Path) -> None:
    from bailing_mtp.weights.sharded.chunks import read_index, read_rows

    with layout(tp=1, ep=1) as context:
        saver = CheckpointSaver(tmp_path, context, keep=2)
        for step in (1, 2, 3):
            store(saver, step)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_2", "step_3"]
    for step in (2, 3):
        directory = tmp_path / f"step_{step}"
        (chunk,) = read_index(directory)["w"]
        assert torch.equal(read_rows(directory, chunk, 0, 4), torch.full((4, 3), float(step)))
    assert (tmp_path / "latest").read_text() == "step_3\n"


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    with layout(tp=1, ep=1) as context:
        for _ in range(2):
            store(CheckpointSaver(tmp_path, context, keep=2), 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_5"]
    verify(tmp_path / "step_5")
