"""sft and dpo as verbs, in this process: a fine-tuned checkpoint, then preferences on it, stopped and continued."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bailing_mtp.config import ConfigError, DpoConfig, PretrainConfig, SftConfig, build_config
from bailing_mtp.data.tokenizer import train_tokenizer
from bailing_mtp.errors import UserError
from bailing_mtp.parallel.context import destroy_context
from bailing_mtp.training.metrics import read_metrics
from recipes import dpo, finetune, sft
from recipes.common import prepare
from recipes.ranks import Ranks

ALONE = Ranks(rank=0, world_size=1, host="here")
SMALL = (
    "model=tiny", "model.architecture.vocab_size=300", "model.architecture.hidden_size=64",
    "model.architecture.num_hidden_layers=2", "model.architecture.layer_group_size=2", "log=quiet",
    "data.chat_template=plain", "mtp=detached", "train.tokens_per_step=256", "train.microbatch_tokens=256",
    "data.valid_fraction=0.1", "optim.schedule=constant", "optim.lr=1e-3",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _groups_end_with_the_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(finetune, "leave_ranks", destroy_context)


def run(verb: str, *arguments: str) -> None:
    main, config_cls = {"sft": (sft.main, SftConfig), "dpo": (dpo.main, DpoConfig)}[verb]
    started: Callable[[object], None] = main
    try:
        started(prepare(config_cls, verb, [*SMALL, *arguments], ALONE))
    finally:
        destroy_context()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sft run of two steps on generated problems."""
    root = tmp_path_factory.mktemp("sft")
    train_tokenizer(["Question: what is 1 + 1? Answer: 2"] * 9, 300).save(root / "tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune, "leave_ranks", destroy_context)
        run(
            "sft", f"run_dir={root}/run", "data.path=reasoning_gym:chain_sum?documents=40", "data.seq_tokens=128",
            f"data.tokenizer={root}/tokenizer", "train.steps=2", "train.eval_every=2", "train.eval_steps=1",
        )  # fmt: skip
    return root / "run"


def test_sft_trains_responses_and_keeps_the_tokenizer(tuned: Path):
    rows = read_metrics(tuned / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2] and rows[1]["train/lm_loss"] < rows[0]["train/lm_loss"]
    assert {"mtp/loss_depth1", "valid/lm_loss", "valid/mtp_accept_depth1"} <= rows[1].keys()
    assert (tuned / "checkpoints" / "step_2" / "tokenizer.json").is_file()


def write_pairs(file: Path) -> Path:
    lines = [{"prompt": f"What is {n} + 1?", "chosen": f" {n + 1}", "rejected": f" not {n}"} for n in range(30)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_dpo_keeps_its_reference_when_it_continues(
    tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = (
        f"checkpoint.load={tuned}/checkpoints/step_2", f"data.path={write_pairs(tmp_path / 'pairs.jsonl')}",
        "data.seq_tokens=64", "dpo.beta=0.5", "checkpoint.save_every=2",
    )  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run("dpo", f"run_dir={whole}", "train.steps=4", *arguments)
    rows = read_metrics(whole / "metrics.jsonl")
    assert rows[0]["dpo/loss"] == pytest.approx(0.693147, abs=1e-3)
    assert rows[-1]["dpo/loss"] < rows[0]["dpo/loss"] and rows[-1]["dpo/margin"] > 0
    run("dpo", f"run_dir={parts}", "train.steps=2", *arguments)
    assert capsys.readouterr().out.count("reference: log-probabilities of 60 rows") == 2
    run("dpo", f"run_dir={parts}", "train.steps=4", *arguments)
    assert "reference:" not in capsys.readouterr().out
    for ours, theirs in zip(read_metrics(parts / "metrics.jsonl"), rows, strict=True):
        names = [name for name in theirs if name.startswith(("dpo/", "mtp/"))]
        assert [ours[name] for name in names] == [theirs[name] for name in names]
    (file,) = (parts / "data").glob("reference-*.safetensors")
    assert file.name == next((whole / "data").glob("reference-*.safetensors")).name
    file.unlink()
    with pytest.raises(UserError, match="reference log-probabilities of the run's start are gone"):
        run("dpo", f"run_dir={parts}", "train.steps=6", *arguments)


def test_other_weights_and_other_data_have_other_references(tuned: Path, tmp_path: Path):
    shared = tmp_path / "shared"
    pairs = write_pairs(tmp_path / "pairs.jsonl")

    def start(name: str, load: str, *more: str) -> None:
        run(
            "dpo", f"run_dir={tmp_path}/{name}", load, f"data.path={pairs}", "data.seq_tokens=64", "train.steps=1",
            f"dpo.reference_dir={shared}", *more,
        )  # fmt: skip

    tokenizer = f"data.tokenizer={tuned}/checkpoints/step_2"
    start("tuned", f"checkpoint.load={tuned}/checkpoints/step_2")
    start("again", f"checkpoint.load={tuned}/checkpoints/step_2", "seed=5")
    assert len(list(shared.iterdir())) == 1
    start("moved", f"checkpoint.load={tmp_path}/tuned/checkpoints/step_1")
    start("random", "checkpoint.load=null", tokenizer)
    start("seed", "checkpoint.load=null", tokenizer, "seed=5")
    assert len(list(shared.iterdir())) == 4


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (DpoConfig, {"mtp": {"loss_scale": 0.1}}, "mtp.detach: false with dpo"),
        (DpoConfig, {"train": {"steps": 2, "microbatch_tokens": 199}}, "cannot hold a pair of rows .* at least 200"),
        (SftConfig, {"train": {"steps": 2, "microbatch_tokens": 99}}, "cannot hold a document"),
        (SftConfig, {"data": {"path": "x", "vocab_size": 9}}, "data.vocab_size: unknown key"),
    ],
)
def test_what_cannot_be_trained_is_refused(cls: type, values: dict, message: str):
    data, load = {"path": "p", "seq_tokens": 100}, {"load": "c"}
    base = {"run_dir": "x", "checkpoint": load, "data": data, "train": {"steps": 2}}
    with pytest.raises(ConfigError, match=message):
        build_config(cls, base | values)
    build_config(cls, base | {"mtp": {"loss_scale": 0.1, "detach": True}})
    build_config(PretrainConfig, base | {"mtp": {"loss_scale": 0.1}})


def test_joint_mtp_with_a_sequence_loss_has_one_check():
    from bailing_mtp.config import check_mtp_divisor

    with pytest.raises(ConfigError, match="mtp.detach: false with rl.loss=gspo"):
        check_mtp_divisor(loss_scale=0.1, detach=False, main_loss="rl.loss=gspo")
    check_mtp_divisor(loss_scale=0.1, detach=True, main_loss="rl.loss=gspo")
    check_mtp_divisor(loss_scale=None, detach=False, main_loss="rl.loss=gspo")
