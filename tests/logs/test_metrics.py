"""metrics.jsonl: what is written is read back, and a run that continues leaves no step twice."""

import math
import time
from pathlib import Path

import pytest

from bailing_mtp.errors import UserError
from bailing_mtp.training.metrics import MetricsFile, Throughput, read_metrics, truncate_after


def written(path: Path, steps: range) -> None:
    file = MetricsFile(path)
    for step in steps:
        file.write(step, {"train/lm_loss": step / 2})
    file.close()


def test_values_come_back_and_what_is_not_finite_is_null(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(3, {"train/lm_loss": 0.1, "mtp/loss_depth1": math.nan, "train/grad_norm": math.inf})
    file.close()
    assert read_metrics(path) == [
        {"step": 3, "train/lm_loss": 0.1, "mtp/loss_depth1": None, "train/grad_norm": None}
    ]


def test_continuing_cuts_later_steps_and_an_unfinished_line(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    written(path, range(1, 8))
    with path.open("a") as file:
        file.write('{"step": 8, "train/lm')
    assert [row["step"] for row in read_metrics(path)] == list(range(1, 8))
    assert truncate_after(path, 5) == 3
    written(path, range(6, 9))
    assert [row["step"] for row in read_metrics(path)] == list(range(1, 9))
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_nothing_to_cut_leaves_the_file_alone(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    assert truncate_after(path, 5) == 0 and not path.exists()
    written(path, range(1, 4))
    before = path.stat()
    assert truncate_after(path, 3) == 0
    assert path.stat().st_ino == before.st_ino and path.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("line", ["{not json", "[1]", '{"train/lm_loss": 1.0}', '{"step": "2"}'])
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: is no line of metrics"):
        read_metrics(path)


def test_pauses_do_not_slow_the_pace_down():
    pace = Throughput(steps=4)
    time.sleep(0.02)
    with pace.paused():
        time.sleep(0.2)
    pace.add(100)
    pace.add(50)
    interval = pace.read()
    assert interval.tokens == 150 and 0.02 <= interval.seconds < 0.15
    assert pace.elapsed_s() >= 0.22 and 0.02 <= pace.trained_s() < 0.15 and pace.read().tokens == 0
