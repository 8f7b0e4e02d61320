"""What a user may ask of the MTP loss, and what a checkpoint may not decide for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bailing_mtp.config import ConfigError, PretrainConfig, check_mtp_divisor
from bailing_mtp.training.state import build_state
from recipes.common import prepare
from recipes.ranks import Ranks
from recipes.session import find_source, make_model, require_mtp
from tests.distributed import worlds

ALONE = Ranks(rank=0, world_size=1, host="here")


def test_joint_loss_beside_a_loss_per_sequence_is_refused():
    with pytest.raises(ConfigError) as caught:
        check_mtp_divisor(loss_scale=0.1, detach=False, main_loss="rl.loss=gspo")
    (line,) = caught.value.problems
    assert line.startswith("mtp.detach: false with rl.loss=gspo: ")
    assert "mtp.detach=true" in line and "mtp.loss_scale=null" in line
    check_mtp_divisor(loss_scale=0.1, detach=True, main_loss="dpo")
    check_mtp_divisor(loss_scale=None, detach=False, main_loss="dpo")


@pytest.mark.parametrize("value", ["0", "-0.1", ".nan", ".inf"])
def test_scale_that_is_no_weight_is_refused(tmp_path: Path, value: str):
    arguments = ["experiment=demo", f"mtp.loss_scale={value}", f"run_dir={tmp_path}/a"]
    with pytest.raises(ConfigError, match="mtp.loss_scale: "):
        prepare(PretrainConfig, "pretrain", arguments, ALONE)


@pytest.mark.parametrize("loss_scale", ["null", "0.1"])
def test_the_checkpoints_own_factor_is_told_and_never_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], loss_scale: str
):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    fixture = worlds.FIXTURES / "moe"
    (checkpoint / "model.safetensors").symlink_to(fixture / "model.safetensors")
    config_json = json.loads((fixture / "config.json").read_text()) | {"mtp_loss_scaling_factor": 0.3}
    (checkpoint / "config.json").write_text(json.dumps(config_json))
    config = prepare(
        PretrainConfig,
        "pretrain",
        [f"checkpoint.load={checkpoint}", "data.path=reasoning_gym:gcd", "train.steps=1", "model.dtype=fp32",
         f"mtp.loss_scale={loss_scale}", f"run_dir={tmp_path}/run"],
        ALONE,
    )  # fmt: skip
    assert config.mtp.loss_scale == (None if loss_scale == "null" else 0.1)
    source = require_mtp(find_source(config, resumes=True), config, config.mtp.loss_scale)
    with worlds.layout(tp=1, ep=1) as context:
        built = make_model(config, source, context, with_mtp=config.mtp.loss_scale is not None)
        state = build_state(built, context, config.optim, 1)
    assert (state.mtp is None) == (config.mtp.loss_scale is None)
    out = capsys.readouterr().out
    assert f"loss_scale={loss_scale}" in out and "ignored: mtp_loss_scaling_factor=0.3 of the checkpoint" in out
