"""Export: byte-equal round trips, the MTP layer passed through, a config that says what the files hold."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.weights.checkpoint_files import CheckpointError, open_checkpoint, read_header
from bailing_mtp.weights.export import export_hf
from bailing_mtp.weights.load import load_hf, read_architecture
from bailing_mtp.weights.shard_writer import PlannedTensor, ShardWriter
from tests.weights.stand_in import (
    FIXTURES,
    WHOLE,
    assert_same_bytes,
    build,
    stored,
    tiny_config,
    write_checkpoint,
    write_tensors,
)


def loaded(
    directory: Path, with_mtp: bool = True, dtype: torch.dtype = torch.bfloat16
) -> tuple[Architecture, nn.Module, nn.Module | None]:
    arch = read_architecture(directory)
    trunk, mtp = build(arch, WHOLE, dtype)
    load_hf(directory, arch, WHOLE, trunk, mtp if with_mtp else None)
    return arch, trunk, mtp if with_mtp else None


def config_of(directory: Path) -> dict[str, object]:
    return json.loads((directory / "config.json").read_text())


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    return tmp_path / "hf", write_checkpoint(tmp_path / "hf", tiny_config())


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 300_000])
def test_round_trip_of_the_fixtures_is_byte_equal(tmp_path: Path, kind: str, max_shard_bytes: int) -> None:
    arch, trunk, mtp = loaded(FIXTURES / kind)
    target = tmp_path / "out"
    report = export_hf(
        target, arch, WHOLE, trunk, mtp, source=FIXTURES / kind, max_shard_bytes=max_shard_bytes
    )
    assert_same_bytes(stored(target), stored(FIXTURES / kind))
    assert config_of(target) == config_of(FIXTURES / kind)
    assert report is not None and report.num_mtp_layers == 1 and report.passed_through == ()
    assert report.written_bytes == sum(t.n_bytes for t in open_checkpoint(target).tensors.values())


@pytest.mark.parametrize(
    "changes", [{}, {"q_lora_rank": None}, {"tie_word_embeddings": True}, {"first_k_dense_replace": 9}]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_trip_of_variants(tmp_path: Path, changes: dict[str, object], dtype: torch.dtype) -> None:
    hf = write_checkpoint(tmp_path / "hf", tiny_config(**changes))
    arch, trunk, mtp = loaded(tmp_path / "hf", dtype=dtype)
    export_hf(tmp_path / "out", arch, WHOLE, trunk, mtp, source=tmp_path / "hf")
    assert_same_bytes(stored(tmp_path / "out"), hf)


def test_expert_bias_survives_in_fp32(tiny: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """Trunk and MTP layer; also when somebody asks for bf16 everywhere."""
    directory, hf = tiny
    arch, trunk, mtp = loaded(directory)
    everything_bf16 = {name: torch.bfloat16 for name in hf}
    export_hf(tmp_path / "out", arch, WHOLE, trunk, mtp, dtypes=everything_bf16)
    again = stored(tmp_path / "out")
    for layer in (1, 2, 3):
        name = f"model.layers.{layer}.mlp.gate.expert_bias"
        assert again[name].dtype == torch.float32
        assert torch.equal(again[name], hf[name]) and not torch.equal(hf[name], hf[name].bfloat16().float())


def test_mtp_off_passes_the_layer_through(tiny: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    directory, hf = tiny
    arch, trunk, _ = loaded(directory, with_mtp=False)
    with torch.no_grad():
        trunk.get_parameter("embedding.weight").mul_(2)
    report = export_hf(tmp_path / "out", arch, WHOLE, trunk, None, source=directory)
    expected = hf | {"model.word_embeddings.weight": hf["model.word_embeddings.weight"] * 2}
    assert_same_bytes(stored(tmp_path / "out"), expected)
    assert config_of(tmp_path / "out")["num_nextn_predict_layers"] == 1
    assert report is not None
    assert sorted(report.passed_through) == sorted(name for name in hf if name.startswith("model.layers.3."))


def test_mtp_off_without_source_writes_the_trunk_and_says_0(
    tiny: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    directory, hf = tiny
    arch, trunk, _ = loaded(directory, with_mtp=False)
    export_hf(tmp_path / "out", arch, WHOLE, trunk, None)
    assert_same_bytes(
        stored(tmp_path / "out"), {n: t for n, t in hf.items() if not n.startswith("model.layers.3.")}
    )
    assert config_of(tmp_path / "out")["num_nextn_predict_layers"] == 0
    again = read_architecture(tmp_path / "out")
    load_hf(tmp_path / "out", again, WHOLE, build(arch)[0], None)


def test_source_that_lost_its_mtp_layer_says_0(tiny: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    directory, hf = tiny
    trunk_only = {name: tensor for name, tensor in hf.items() if not name.startswith("model.layers.3.")}
    write_tensors(directory, tiny_config(), trunk_only)
    arch, trunk, _ = loaded(directory, with_mtp=False)
    export_hf(tmp_path / "out", arch, WHOLE, trunk, None, source=directory)
    assert_same_bytes(stored(tmp_path / "out"), trunk_only)
    assert config_of(tmp_path / "out")["num_nextn_predict_layers"] == 0


def test_half_an_mtp_layer_in_the_source_is_refused(
    tiny: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    directory, hf = tiny
    arch, trunk, _ = loaded(directory, with_mtp=False)
    del hf["model.layers.3.hnorm.weight"]
    write_tensors(directory, tiny_config(), hf)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.hnorm\.weight"):
        export_hf(tmp_path / "out", arch, WHOLE, trunk, None, source=directory)
    assert not (tmp_path / "out").exists()


def test_without_dtypes_the_parameters_own_are_written(
    tiny: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    directory, hf = tiny
    arch, trunk, mtp = loaded(directory, dtype=torch.float32)
    export_hf(tmp_path / "out", arch, WHOLE, trunk, mtp)
    assert_same_bytes(stored(tmp_path / "out"), {name: tensor.float() for name, tensor in hf.items()})
    assert config_of(tmp_path / "out")["torch_dtype"] == "float32"


def test_index_and_shards(tiny: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    directory, hf = tiny
    arch, trunk, mtp = loaded(directory)
    limit = 1500
    report = export_hf(tmp_path / "out", arch, WHOLE, trunk, mtp, source=directory, max_shard_bytes=limit)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in hf.values())
    assert sorted(index["weight_map"]) == sorted(hf)
    assert report is not None and set(index["weight_map"].values()) == set(report.files)
    assert report.files[0] == f"model-00001-of-{len(report.files):05d}.safetensors"
    for file in report.files:
        sizes = [t.n_bytes for t in open_checkpoint(tmp_path / "out").tensors.values() if t.file.name == file]
        assert sum(sizes) <= limit or len(sizes) == 1


def test_small_files_are_copied_and_stray_weights_are_not(
    tiny: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    directory, _ = tiny
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "modeling_x.py",
        "old.bin",
    ):
        (directory / name).write_text(name)
    arch, trunk, mtp = loaded(directory)
    (tmp_path / "out").mkdir()
    export_hf(tmp_path / "out", arch, WHOLE, trunk, mtp, source=directory)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "chat_template.jinja", "config.json", "model.safetensors", "modeling_x.py", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokenizer.json"


def test_a_target_with_content_is_left_alone(tiny: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    directory, hf = tiny
    arch, trunk, mtp = loaded(directory)
    with pytest.raises(CheckpointError, match="is not an empty directory"):
        export_hf(directory, arch, WHOLE, trunk, mtp, source=directory)
    assert_same_bytes(stored(directory), hf)


def test_a_failed_write_leaves_nothing_behind(
    tiny: tuple[Path, dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = tiny
    arch, trunk, mtp = loaded(directory)

    def full_disk(self: ShardWriter) -> tuple[str, ...]:
        raise OSError("no space left")

    monkeypatch.setattr(ShardWriter, "finish", full_disk)
    with pytest.raises(OSError, match="no space left"):
        export_hf(tmp_path / "out", arch, WHOLE, trunk, mtp)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_writer_holds_callers_to_the_plan_and_aligns_every_tensor(tmp_path: Path) -> None:
    plan = [PlannedTensor("a", (3,), torch.bfloat16), PlannedTensor("b", (1,), torch.float32)]
    with ShardWriter(tmp_path, plan, 100) as writer:
        writer.write("a", torch.tensor([1.0, 2.0, 3.0]))
        with pytest.raises(AssertionError):
            writer.write("b", torch.zeros(2))
        with pytest.raises(AssertionError, match="1 of 2"):
            writer.finish()
        writer.write("b", torch.tensor([0.1]))
        assert writer.finish() == ("model.safetensors",)
    place = read_header(tmp_path / "model.safetensors")
    assert place["b"].begin_bytes % 4 == 0 and place["a"].begin_bytes % 2 == 0
    assert_same_bytes(
        stored(tmp_path), {"a": torch.tensor([1.0, 2.0, 3.0]).bfloat16(), "b": torch.tensor([0.1])}
    )
