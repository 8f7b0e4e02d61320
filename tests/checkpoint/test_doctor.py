"""doctor: what it says of good and bad checkpoints, and whose MTP layer it grafts."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bailing_mtp.config import ConfigError, DoctorConfig, LoadConfig, build_config
from bailing_mtp.data.tokenizer import train_tokenizer
from bailing_mtp.weights.stored import CheckpointError
from recipes import convert, doctor
from tests.weights.stand_in import FIXTURES, assert_same_bytes, stored, tiny_config, write_checkpoint, write_tensors

Tensors = dict[str, Tensor]


def examine(directory: Path, **graft: object) -> int:
    return doctor.main(DoctorConfig(checkpoint=LoadConfig(load=str(directory)), **graft))


def rows(output: str) -> dict[str, str]:
    return {line[:14].strip(): line[14:].strip() for line in output.splitlines() if not line.startswith("would")}


@pytest.mark.parametrize("kind", ["hf", "sharded"])
def test_a_good_checkpoint(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    directory = FIXTURES / "moe"
    if kind == "sharded":
        convert.main(convert.ConvertConfig(source=str(directory), target=str(tmp_path / "sharded"), format="sharded"))
        capsys.readouterr()
        directory = tmp_path / "sharded"
    assert examine(directory) == 0
    found = rows(capsys.readouterr().out)
    assert found["kind"] == {"hf": "Hugging Face directory", "sharded": "sharded, weights alone"}[kind]
    assert found["architecture"] == "BailingMoeV3ForCausalLM"
    assert found["layers"] == "5: 1 KDA+dense, 2 KDA+moe, 2 MLA+moe"
    assert found["tensors"].startswith("350, ") and found["MTP layer"].startswith("complete, 67 tensors")
    assert found["expert bias"] == "5 present (F32)"
    assert found["missing"] == found["unknown"] == found["unusable"] == "none"


def without_mtp(tensors: Tensors) -> Tensors:
    return {n: t for n, t in tensors.items() if not n.startswith("model.layers.3.")}


def without_one(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without_mtp, "num_nextn_predict_layers is 1, but the files hold 0 MTP layers (mtp.loss_scale and"),
        (without_one("model.layers.3.enorm.weight"), "the MTP layer is partial"),
        (without_one("model.layers.1.mlp.gate.expert_bias"), "missing model.layers.1.mlp.gate.expert_bias"),
        (without_one("model.norm.weight"), "missing model.norm.weight"),
        (lambda t: t | {"model.more": torch.zeros(1)}, "unknown tensor model.more"),
        (lambda t: t | {"model.norm.weight": torch.zeros(3)}, "unusable model.norm.weight: [3], expected [12]"),
    ],
)
def test_what_would_not_train_is_said(
    tmp_path: Path, change: Callable[[Tensors], Tensors], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tensors(tmp_path / "bad", tiny_config(), change(write_checkpoint(tmp_path / "hf", tiny_config())))
    assert examine(tmp_path / "bad") == 1
    assert f"would not train: {says}" in capsys.readouterr().out


def test_no_mtp_layer_is_fine_where_the_config_promises_none(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", tiny_config(num_nextn_predict_layers=0))
    assert examine(tmp_path / "hf") == 0


@pytest.fixture
def family(tmp_path: Path) -> tuple[Path, Path, Tensors, Tensors]:
    """A base with an MTP layer, and its fine-tuned child that lost it; both with the same tokenizer."""
    base = write_checkpoint(tmp_path / "base", tiny_config())
    generator = torch.Generator().manual_seed(5)
    child = {
        name: (t.float() * (1 + 0.01 * torch.randn(t.shape, generator=generator))).to(t.dtype)
        for name, t in without_mtp(base).items()
    }
    write_tensors(tmp_path / "child", tiny_config(), child)
    tokenizer = train_tokenizer(["one two three"], 258)
    for side in ("base", "child"):
        tokenizer.save(tmp_path / side)
    return tmp_path / "base", tmp_path / "child", base, child


def test_graft(family: tuple[Path, Path, Tensors, Tensors], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base_dir, child_dir, base, child = family
    assert examine(child_dir, graft_from=str(base_dir), target=str(tmp_path / "new")) == 0
    assert "model.word_embeddings.weight: relative difference" in capsys.readouterr().out
    assert_same_bytes(stored(tmp_path / "new"), base | child)
    assert examine(tmp_path / "new") == 0
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == (child_dir / "tokenizer.json").read_bytes()


def other_embedding(base_dir: Path, base: Tensors) -> str:
    name = "model.word_embeddings.weight"
    write_tensors(base_dir, tiny_config(), base | {name: base[name].flip(0).contiguous()})
    return rf"base: {name} differs .* by 1\.\d+e\+00 .* allowed: max_embedding_difference=0\.1"


def other_tokenizer(base_dir: Path, base: Tensors) -> str:
    train_tokenizer(["four five six seven"], 260).save(base_dir)
    return r"base: its tokenizer \(sha256 \w{12}\) is not that of"


def other_model(base_dir: Path, base: Tensors) -> str:
    write_checkpoint(base_dir, tiny_config(rope_theta=20000))
    return r"are different models: rope_theta: 10000\.0 and 20000\.0"


def no_layer_either(base_dir: Path, base: Tensors) -> str:
    write_tensors(base_dir, tiny_config(), without_mtp(base))
    return r"missing \(MTP layer\)"


@pytest.mark.parametrize("change", [other_embedding, other_tokenizer, other_model, no_layer_either])
def test_graft_from_a_stranger_is_refused(
    family: tuple[Path, Path, Tensors, Tensors], tmp_path: Path, change: Callable[[Path, Tensors], str]
) -> None:
    base_dir, child_dir, base, _ = family
    message = change(base_dir, base)
    with pytest.raises(CheckpointError, match=message):
        examine(child_dir, graft_from=str(base_dir), target=str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_graft_needs_both_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="graft_from and target: give both, or neither"):
        build_config(DoctorConfig, {"checkpoint": {"load": "a"}, "graft_from": "b"})
