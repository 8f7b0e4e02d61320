"""The verb in this process: files, metrics, prediction beside measurement, a run stopped and continued."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from bailing_mtp.config import ConfigError, GrpoConfig, build_config
from bailing_mtp.data.tokenizer import train_tokenizer
from bailing_mtp.parallel.context import destroy_context
from bailing_mtp.training.metrics import read_metrics
from recipes import grpo, session
from recipes.common import prepare
from recipes.compose import compose
from recipes.policy import find_policy
from recipes.progress import RunProgress
from recipes.ranks import Ranks
from recipes.stop_signal import EXIT_STOPPED, SIGNALS

ALONE = Ranks(rank=0, world_size=1, host="here")
SMALL = (
    "model=tiny", "model.architecture.vocab_size=300", "model.architecture.hidden_size=64",
    "model.architecture.num_hidden_layers=2", "model.architecture.layer_group_size=2", "log=quiet",
    "data.path=reasoning_gym:chain_sum?documents=12", "data.chat_template=plain", "data.seq_tokens=128",
    "train.microbatch_tokens=256", "sampling.max_new_tokens=10", "sampling.samples_per_prompt=4",
    "rl.prompts_per_rollout=4", "rl.reward_workers=1", "rl.reward=tests.grpo.rewards:digits", "optim.lr=1e-3",
    "rollout.speculative_tokens=2",
)  # fmt: skip
TIMES = ("time/", "_per_second", "memory/", "rollout_s")


ALL_OF_IT = (
    "train.steps=4", "rl.minibatches=2", "rl.kl_coef=0.1", "rl.truncate_importance=2.0", "checkpoint.save_every=2",
    "sampling.temperature=0.7", "mtp=detached", "rl.routing_replay=true",
    "data.valid_path=reasoning_gym:chain_sum?documents=5", "train.eval_every=4", "train.eval_samples=3",
)  # fmt: skip
"""Two optimizer steps a rollout, KL to the start, importance weights, replayed experts, the MTP layer trained along."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["Question: what is 1 + 1? Answer: 2"] * 9, 300).save(directory)
    return directory


@pytest.fixture(scope="module")
def whole(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("grpo") / "whole"
    run(tokenizer, run_dir, *ALL_OF_IT)
    return run_dir


def arguments_of(tokenizer: Path, run_dir: Path, *arguments: str) -> list[str]:
    return [*SMALL, f"data.tokenizer={tokenizer}", f"run_dir={run_dir}", *arguments]


def run(tokenizer: Path, run_dir: Path, *arguments: str) -> list[dict]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "leave_ranks", destroy_context)
        try:
            grpo.main(prepare(GrpoConfig, "grpo", arguments_of(tokenizer, run_dir, *arguments), ALONE))
        finally:
            destroy_context()
    return read_metrics(run_dir / "metrics.jsonl")


def test_a_run_leaves_everything(whole: Path):
    rows = read_metrics(whole / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert [[name for name in row if name.startswith("valid/")] != [] for row in rows] == [True, False, True]
    held_out = [json.loads(line) for line in (whole / "data" / "held_out.jsonl").read_text().splitlines()]
    assert len(held_out) == 5 and all({"prompt_ids", "text", "answer"} == line.keys() for line in held_out)
    names = (
        "reward/mean", "reward/solved", "rollout/accept_length", "rollout/accept_depth1", "rollout/accept_depth2",
        "rollout/tokens_per_second", "rollout/logprob_gap", "predicted/accept_length", "predicted/accept_depth2",
        "time/rollout_s", "time/reward_s", "time/train_s", "time/switch_s", "memory/rollout_gb", "mtp/loss_depth1",
        "train/tokens_per_second", "policy/entropy",
    )  # fmt: skip
    for row in rows[1:]:
        assert set(names) <= row.keys()
        assert row["rollout/logprob_gap"] < 1e-5 and row["policy/ratio_gap"] < 1e-5
        assert row["rollout/route_agreement"] == 1
        assert row["memory/rollout_gb"] > 0 and row["time/switch_s"] > 0
        # About 60 drafts a depth.
        assert row["predicted/accept_depth1"] == pytest.approx(row["rollout/accept_depth1"], abs=0.25)
    assert rows[2]["policy/kl"] > rows[1]["policy/kl"] > 0
    charts = {file.stem for file in (whole / "charts").iterdir()}
    assert {"reward", "rl", "accept_length", "acceptance", "policy"} <= charts
    lines = (whole / "rollouts" / "step_4.jsonl").read_text().splitlines()
    assert len(lines) == 16 and json.loads(lines[0])["prompt"].endswith("Answer:")


def test_a_stopped_run_continues_exactly(tokenizer: Path, whole: Path, tmp_path: Path):
    """With other memory for rollouts and for the optimizer."""
    parts = tmp_path / "parts"
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "step_4")
    rows = run(tokenizer, parts, *ALL_OF_IT, "rollout.keep_memory=true", "rollout.max_running=16", "optim.offload=cpu")
    assert [row["step"] for row in rows] == [0, 2, 4]
    expected = read_metrics(whole / "metrics.jsonl")[2]
    kept = [name for name in expected if not any(part in name for part in TIMES)]
    assert len(kept) > 20 and {name: rows[2][name] for name in kept} == {name: expected[name] for name in kept}


def test_another_reference_model_is_refused_on_resume(tokenizer: Path, whole: Path, tmp_path: Path):
    """checkpoint.load may change when a run continues, but not where the KL term needs it."""
    other = f"checkpoint.load={whole}/checkpoints/step_2"
    changed = arguments_of(tokenizer, whole, *ALL_OF_IT, other)
    with pytest.raises(ConfigError, match=r"checkpoint.load: was null when .*step_4 was written, now '.*step_2'"):
        find_policy(build_config(GrpoConfig, compose(GrpoConfig, "grpo", changed)))
    same = build_config(GrpoConfig, compose(GrpoConfig, "grpo", arguments_of(tokenizer, whole, *ALL_OF_IT)))
    assert find_policy(same).resumes


def test_a_signal_ends_a_run_after_the_step_in_progress(
    tokenizer: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    compare = RunProgress.compare

    def asked_while_rolling_out(self: RunProgress, *arguments: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        compare(self, *arguments)

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunProgress, "compare", asked_while_rolling_out)
        with pytest.raises(SystemExit) as end:
            run(tokenizer, tmp_path / "run", *ALL_OF_IT, "checkpoint.save_every=null")
    assert end.value.code == EXIT_STOPPED and "stopped by SIGTERM after step 2/4" in capsys.readouterr().out
    # A signal that is sent again must not cut the end short.
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    # An ignored signal would be inherited by every process that later tests start.
    for number, handler in handlers.items():
        signal.signal(number, handler)
    rows = run(tokenizer, tmp_path / "run", *ALL_OF_IT)
    expected = read_metrics(whole / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 2, 4]
    for row, other in zip(rows[1:], expected[1:], strict=True):
        kept = [name for name in other if not any(part in name for part in TIMES)]
        assert len(kept) > 20 and {name: row[name] for name in kept} == {name: other[name] for name in kept}


def test_an_oversampled_run_carries_samples_over_and_continues_exactly(tokenizer: Path, tmp_path: Path):
    """Five rows at a time, so that the eight prompts' samples end apart; stopped with some of them under way. With
    8-bit states, whose rounding must continue, too."""
    arguments = (
        "train.steps=6", "rl.oversample=2.0", "rl.carry_limit=3", "rl.truncate_importance=2.0",
        "rollout.max_running=5", "checkpoint.save_every=3", "mtp=detached", "rl.routing_replay=true", "optim=adamw8bit",
        "model.dtype=bf16",
    )  # fmt: skip
    rows = run(tokenizer, tmp_path / "whole", *arguments)
    assert [row["rollout/samples_trained"] for row in rows] == [16] * 6
    assert all(row["rollout/carried_samples"] > 0 for row in rows) and rows[0]["rollout/stale_tokens"] == 0
    assert max(row["rollout/stale_tokens"] for row in rows) > 0.1
    assert all(0 <= row["rollout/mean_version_lag"] <= 3 for row in rows)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step_6")
    again = run(tokenizer, tmp_path / "parts", *arguments)
    assert [row["step"] for row in again] == list(range(1, 7))
    for ours, theirs in zip(again[3:], rows[3:], strict=True):
        kept = [name for name in theirs if not any(part in name for part in TIMES)]
        assert len(kept) > 20 and {name: ours[name] for name in kept} == {name: theirs[name] for name in kept}


def test_a_frozen_layer_drafts_and_stays_in_the_checkpoint(tokenizer: Path, tmp_path: Path):
    arguments = ("train.steps=1", "rl=gspo", "sampling.top_p=0.9", "rl.refill=true", "optim=adamw8bit")
    (row,) = run(tokenizer, tmp_path / "run", *arguments)
    assert row["rollout/accept_depth1"] > 0 and row["policy/ratio_gap"] < 1e-5
    # What was sampled is cut by top-p, which a prediction from logits does not know.
    assert "mtp/loss_depth1" not in row and "predicted/accept_length" not in row
    again = build_config(
        GrpoConfig, compose(GrpoConfig, "grpo", arguments_of(tokenizer, tmp_path / "run", *arguments))
    )
    assert find_policy(again).holds_mtp
