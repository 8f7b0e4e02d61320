"""A recipe as a program: one run directory, one message on a mistake, nothing touched before it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bailing_mtp.config import ConfigError, PretrainConfig, UserError, build_config
from recipes import common
from recipes.common import prepare
from recipes.failure import user_errors
from recipes.ranks import Ranks
from recipes.rundir import default_run_dir

ROOT = Path(__file__).resolve().parents[2]
VERB = str(Path(__file__).with_name("verb.py"))
ALONE = Ranks(rank=0, world_size=1, host="here")
SECOND = Ranks(rank=1, world_size=2, host="there")


def start(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, VERB, "experiment=demo", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def start_two(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, str(ROOT / "launch" / "elastic.py"), "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, VERB, "experiment=demo", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def prepared(*arguments: str, ranks: Ranks = ALONE) -> PretrainConfig:
    return prepare(PretrainConfig, "pretrain", ["experiment=demo", *arguments], ranks)


def test_user_mistakes_end_with_one_message(tmp_path: Path):
    missing = start(tmp_path, "data.path=missing", "run_dir=a")
    assert (missing.returncode, missing.stderr) == (1, "error: no/such/file: No such file or directory\n")
    bad = start(tmp_path, "model.dtype=fp8", "seed=-1", "run_dir=b")
    assert bad.returncode == 1 and bad.stdout == ""
    assert re.fullmatch(r"error: seed: -1 is .*\n  model\.dtype: 'fp8' is .*\n", bad.stderr)
    assert not (tmp_path / "b").exists()


def test_other_exceptions_keep_their_traceback(tmp_path: Path):
    result = start(tmp_path, "data.path=bug", "run_dir=a")
    assert result.returncode == 1
    assert "Traceback" in result.stderr and "ZeroDivisionError: a programmer's error" in result.stderr


def test_two_ranks_make_one_run_and_tell_a_mistake_once(tmp_path: Path):
    good = start_two(tmp_path, "run_dir=out", "train.steps=60")
    assert good.returncode == 0, good.stderr
    assert good.stdout.count("ran 60 steps") == 2 and good.stdout.count("pretrain: 2 rank(s)") == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.resolved.yaml"]
    bad = start_two(tmp_path, "mtp.loss_scale=0", "run_dir=other")
    assert bad.returncode == 1
    assert re.fullmatch(r"error: mtp\.loss_scale: 0 is not allowed.*\n", bad.stderr)
    assert not (tmp_path / "other").exists()


def test_rank_that_fails_alone_speaks_for_itself(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end, user_errors(SECOND, patience_s=0.01):
        raise ConfigError("data.path: a", "seed: b")
    assert end.value.code == 1
    assert capsys.readouterr().err == "error: rank 1 (there): data.path: a\n  seed: b\n"


def test_what_is_in_force_is_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = prepared(f"run_dir={tmp_path}/a,b", "mtp.loss_scale=0.25")
    out = capsys.readouterr().out
    assert f"run_dir={tmp_path}/a,b" in out and "loss_scale=0.25" in out and "detach=false" in out
    assert (tmp_path / "a,b" / "config.resolved.yaml").is_file()
    assert config.mtp.loss_scale == 0.25


def test_resolved_config_builds_the_same_run(tmp_path: Path):
    from omegaconf import OmegaConf

    config = prepared(f"run_dir={tmp_path}/run", "optim.lr=0.125")
    saved = OmegaConf.to_container(OmegaConf.load(tmp_path / "run" / "config.resolved.yaml"))
    assert build_config(PretrainConfig, saved) == config
    # The file alone is a config to start from.
    again = ["--config-dir", str(tmp_path / "run"), "--config-name", "config.resolved", f"run_dir={tmp_path}/again"]
    found = prepare(PretrainConfig, "pretrain", [*again, "seed=9"], ALONE)
    assert found == config.model_copy(update={"run_dir": f"{tmp_path}/again", "seed": 9})


def test_another_runs_directory_is_refused_untouched(tmp_path: Path):
    run_dir = tmp_path / "run"
    prepared(f"run_dir={run_dir}", "seed=1")
    before = (run_dir / "config.resolved.yaml").read_bytes()
    with pytest.raises(ConfigError, match="already holds a run; name another directory"):
        prepared(f"run_dir={run_dir}", "seed=2")
    assert (run_dir / "config.resolved.yaml").read_bytes() == before
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="already holds a run"):
        prepared(f"run_dir={tmp_path}/foreign")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; name a directory"):
        prepared(f"run_dir={tmp_path}/file")


def test_a_start_that_is_refused_late_does_not_claim_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run_dir = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["pretrain", "experiment=demo", f"run_dir={run_dir}"])

    def refused(config: PretrainConfig) -> None:
        assert (run_dir / "config.resolved.yaml").is_file()
        raise UserError("data.path: line 3 is no object")

    def failed_later(config: PretrainConfig) -> None:
        (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
        raise UserError("step 2: the loss is not finite")

    def bad_line(config: PretrainConfig) -> None:
        (run_dir / "data").mkdir()
        refused(config)

    def after_tokenising(config: PretrainConfig) -> None:
        (run_dir / "data" / "shards").mkdir(parents=True)
        refused(config)

    def before_the_first_step(config: PretrainConfig) -> None:
        (run_dir / "metrics.jsonl").touch()
        refused(config)

    for main, left in (
        (refused, set()),
        (before_the_first_step, set()),
        (bad_line, set()),
        (after_tokenising, {"data"}),
        (failed_later, {"config.resolved.yaml", "metrics.jsonl", "data"}),
    ):
        with pytest.raises(SystemExit):
            common.run(main, PretrainConfig, "pretrain")
        assert {path.name for path in run_dir.iterdir()} == left


def test_a_run_with_a_checkpoint_continues_and_says_what_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    run_dir = tmp_path / "run"
    prepared(f"run_dir={run_dir}", "train.steps=60")
    (run_dir / "checkpoints" / "step_10").mkdir(parents=True)
    prepared(f"run_dir={run_dir}", "train.steps=90")
    assert "changed: train.steps: 60 at first start, now 90" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="already holds a run"):
        prepared(f"run_dir={run_dir}", "checkpoint.resume=never")


def test_a_job_that_died_before_its_first_checkpoint_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run_dir = tmp_path / "run"

    def start(job: str, restarts: int, *arguments: str) -> str:
        monkeypatch.setenv("RUN_JOB", job)
        monkeypatch.setenv("RUN_RESTARTS", str(restarts))
        prepared(f"run_dir={run_dir}", *arguments)
        return capsys.readouterr().out

    assert "starts again" not in start("a:7", 0)
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    assert "starts again at step 0" in start("a:7", 1) and "starts again at step 0" in start("a:7", 2)
    others = [("a:8", 1, ()), ("a:7", 0, ()), ("", 1, ()), ("a:7", 1, ("seed=5",)), ("a:7", 1, ("log=quiet",))]
    for job, restarts, arguments in others:
        with pytest.raises(ConfigError, match="already holds a run"):
            start(job, restarts, *arguments)
    # With a checkpoint there is something to lose.
    (run_dir / "checkpoints" / "step_1").mkdir(parents=True)
    with pytest.raises(ConfigError, match="already holds a run"):
        start("a:7", 1, "checkpoint.resume=never")
    assert "starts again" not in start("a:7", 1)


def test_a_directory_that_no_job_made_is_no_jobs_to_use_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    prepared(f"run_dir={tmp_path}/run")
    monkeypatch.setenv("RUN_JOB", "a:7")
    monkeypatch.setenv("RUN_RESTARTS", "1")
    with pytest.raises(ConfigError, match="already holds a run"):
        prepared(f"run_dir={tmp_path}/run")


def test_a_programmers_error_is_told_with_rank_and_host():
    with pytest.raises(ZeroDivisionError) as end, user_errors(SECOND):
        raise ZeroDivisionError("a programmer's error")
    phase = "in test_a_programmers_error_is_told_with_rank_and_host of tests/config/test_run.py"
    assert end.value.__notes__ == [f"on rank 1 (there), {phase}"]
    # An environment may lie inside the checkout: what it holds is not where the run was.
    library = compile("1 / 0", str(ROOT / ".venv" / "lib" / "site-packages" / "library.py"), "exec")
    with pytest.raises(ZeroDivisionError) as end, user_errors(SECOND):
        exec(library)
    assert end.value.__notes__ == [f"on rank 1 (there), {phase}"]
    with pytest.raises(ZeroDivisionError) as end, user_errors(ALONE):
        raise ZeroDivisionError("a programmer's error")
    assert not hasattr(end.value, "__notes__")


def test_second_rank_neither_writes_nor_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_dir = tmp_path / "run"
    prepared(f"run_dir={run_dir}")
    capsys.readouterr()
    prepared(f"run_dir={run_dir}", ranks=SECOND)
    prepared(f"run_dir={tmp_path}/new", ranks=SECOND)
    assert capsys.readouterr().out == "" and not (tmp_path / "new").exists()


def test_run_dir_is_one_for_all_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RUN_DIR", "from/launch")
    assert default_run_dir("pretrain", SECOND) == "from/launch"
    monkeypatch.delenv("RUN_DIR")
    assert re.fullmatch(r"outputs/pretrain/[\d-]+_[\d-]+", default_run_dir("pretrain", ALONE))
    with pytest.raises(ConfigError, match="run_dir: 2 ranks, 1 of them on this host, must agree .* set RUN_DIR"):
        prepared(ranks=SECOND)


def test_ranks_of_one_host_name_the_directory_after_their_launcher(tmp_path: Path):
    show = "import time; time.sleep({}); from recipes.ranks import Ranks; from recipes.rundir import *; "
    show += "print(default_run_dir('sft', Ranks.from_environment()))"
    env = {k: v for k, v in os.environ.items() if k != "RUN_DIR"}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    # The second rank looks more than a second later.
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", show.format(wait_s)],
            env=env | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, wait_s in enumerate((0.0, 1.2))
    ]
    first, second = (rank.communicate(timeout=60)[0] for rank in ranks)
    assert first == second and re.fullmatch(r"outputs/sft/[\d-]+_[\d-]+\n", first)
