"""Where a model comes from: partial MTP layers are never silent, and a run continues only as itself."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bailing_mtp.config import (
    ConfigError,
    DpoConfig,
    GrpoConfig,
    PretrainConfig,
    SftConfig,
    build_config,
    key_paths,
)
from bailing_mtp.errors import UserError
from bailing_mtp.weights.sharded.manifest import write_manifest
from bailing_mtp.weights.sharded.save import complete_checkpoints
from recipes import convert
from recipes.sources import check_same_run, find_source, require_mtp
from tests.weights.stand_in import tiny_config, write_checkpoint, write_tensors

GIVEN: dict[str, Any] = {
    "run_dir": "out",
    "data": {"path": "x", "seq_tokens": 64},
    "train": {"steps": 60, "microbatch_tokens": 64},
}


def config(**changes: Any) -> PretrainConfig:
    """Changes by dotted key, with __ for the dot."""
    plain = {**GIVEN, "checkpoint": {"load": "ckpt"}}
    for path, value in changes.items():
        node = plain
        *sections, key = path.split("__")
        for section in sections:
            node[section] = dict(node.get(section, {}))
            node = node[section]
        node[key] = value
    return build_config(PretrainConfig, plain)


def same(before: PretrainConfig, after: PretrainConfig) -> None:
    check_same_run(before.model_dump(mode="json"), after.model_dump(mode="json"), Path("run/step_3"))


@pytest.mark.parametrize(
    "changes",
    [
        {"log__wandb": "disabled"}, {"checkpoint__keep": 9}, {"checkpoint__save_every": 7}, {"run_dir": "moved"},
        {"parallel__tp": 2, "parallel__ep": 2}, {"train__log_every": 5}, {"train__recompute": "full"},
        {"data__path": "the_same_file_elsewhere"}, {"model__kda": "fla"},
    ],
)  # fmt: skip
def test_harmless_keys_may_change(changes: dict[str, Any]) -> None:
    same(config(), config(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim__lr": 0.5}, r"optim\.lr: was 0\.0003 when run/step_3 was written, now 0\.5"),
        ({"seed": 3}, "seed: was 0"),
        ({"mtp__loss_scale": 0.5}, r"mtp\.loss_scale: was None"),
        ({"model__dtype": "fp32"}, r"model\.dtype: was 'bf16'"),
        ({"train__tokens_per_step": 128}, r"train\.tokens_per_step"),
        ({"train__steps": 90}, r"train\.steps: was 60"),
        ({"optim__schedule": "constant"}, r"optim\.schedule"),
        ({"data__seq_tokens": 32}, r"data\.seq_tokens"),
    ],
)
def test_keys_that_make_another_run_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        same(config(), config(**changes))


def test_every_changed_key_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        same(config(), config(optim__lr=0.5, seed=3, log__wandb="disabled"))
    assert [problem.partition(":")[0] for problem in caught.value.problems[:-1]] == ["seed", "optim.lr"]


def test_more_steps_are_allowed_where_the_rate_does_not_depend_on_them() -> None:
    for optim in ({"schedule": "constant"}, {"schedule": "cosine", "decay_steps": 20}):
        changes = {f"optim__{key}": value for key, value in optim.items()}
        same(config(**changes), config(**changes, train__steps=90))
    with pytest.raises(ConfigError, match=r"train\.steps"):
        same(config(optim__schedule="wsd"), config(optim__schedule="wsd", train__steps=90))


def test_what_may_change_exists() -> None:
    from recipes.sources import MAY_CHANGE

    known = {path for verb in (PretrainConfig, SftConfig, DpoConfig, GrpoConfig) for path in key_paths(verb)}
    assert not set(MAY_CHANGE) - known


def trained(directory: Path, **changes: Any):
    settings = config(checkpoint__load=str(directory), mtp__loss_scale=0.3, **changes)
    return require_mtp(find_source(settings), settings, settings.mtp.loss_scale)


@pytest.mark.parametrize("lost", ["all", "one"])
def test_a_lost_mtp_layer_is_an_error_that_lists_it(tmp_path: Path, lost: str) -> None:
    tensors = write_checkpoint(tmp_path / "hf", tiny_config())
    mtp = [name for name in tensors if name.startswith("model.layers.3.")]
    gone = mtp if lost == "all" else mtp[4:5]
    write_tensors(tmp_path / "bad", tiny_config(), {n: t for n, t in tensors.items() if n not in gone})
    with pytest.raises(UserError) as caught:
        trained(tmp_path / "bad")
    assert f"{len(gone)} missing (MTP layer):\n  {gone[0] if lost == 'one' else ''}" in str(caught.value)
    assert "checkpoint.allow_fresh_mtp=true" in str(caught.value)
    source = trained(tmp_path / "bad", checkpoint__allow_fresh_mtp=True)
    assert sorted(source.fresh_mtp) == sorted(gone) and source.holds_mtp


def test_a_model_without_mtp_says_where_to_get_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", tiny_config(num_nextn_predict_layers=0))
    with pytest.raises(ConfigError, match="graft_from=<base dir>"):
        trained(tmp_path / "hf")
    source = trained(tmp_path / "hf", checkpoint__allow_fresh_mtp=True)
    assert source.arch.num_mtp_layers == 1 and len(source.fresh_mtp) > 20


def test_whole_layers_are_never_fresh(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", tiny_config())
    assert trained(tmp_path / "hf", checkpoint__allow_fresh_mtp=True).fresh_mtp == ()


def test_both_kinds_load(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", tiny_config())
    convert.main(convert.ConvertConfig(source=str(tmp_path / "hf"), target=str(tmp_path / "sharded"), format="sharded"))
    hf, sharded = (find_source(config(checkpoint__load=str(tmp_path / kind))) for kind in ("hf", "sharded"))
    assert (hf.arch, hf.holds_mtp, hf.router_dtype) == (sharded.arch, True, torch.bfloat16)
    assert hf.sharded is None and sharded.sharded is not None and not sharded.resumes


def test_a_model_beside_a_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    """Its sizes would not be used, so that a run would not be what its config says."""
    write_checkpoint(tmp_path / "hf", tiny_config())
    load = {"checkpoint__load": str(tmp_path / "hf")}
    same_sizes = find_source(config(**load, model__architecture={**tiny_config(), "num_nextn_predict_layers": 0}))
    assert same_sizes.holds_mtp and same_sizes.arch == find_source(config(**load)).arch
    hidden = tiny_config()["hidden_size"]
    with pytest.raises(ConfigError, match=rf"^model\.architecture: .*hf \(hidden_size 512 against {hidden}\); allowed"):
        find_source(config(**load, model__architecture={**tiny_config(), "hidden_size": 512}))


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for name in ("step_2", "step_10", "step_30", ".step_40.partial", "step_x"):
        (root / name).mkdir(parents=True)
    for name in ("step_2", "step_10", ".step_40.partial", "step_x"):
        write_manifest(root / name, {})
    assert [path.name for path in complete_checkpoints(root)] == ["step_2", "step_10"]


def test_weights_alone_cannot_be_continued(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", tiny_config())
    target = tmp_path / "run" / "checkpoints" / "step_1"
    convert.main(convert.ConvertConfig(source=str(tmp_path / "hf"), target=str(target), format="sharded"))
    with pytest.raises(UserError, match="step_1: holds weights alone"):
        find_source(config(run_dir=str(tmp_path / "run")), resumes=True)
    assert find_source(config(checkpoint__load=str(tmp_path / "hf"), run_dir=str(tmp_path / "run"))).files
