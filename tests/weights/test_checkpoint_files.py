"""Damaged, pickled and contradictory checkpoint directories are refused by name, before data is read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bailing_mtp.weights.checkpoint_files import (
    CheckpointError,
    open_checkpoint,
    read_architecture,
    read_header,
    tensor_reader,
)
from bailing_mtp.weights.names import Slice
from tests.weights.stand_in import tiny_config


def sharded(directory: Path) -> dict[str, Tensor]:
    """Two shards and an index."""
    tensors = {
        "a": torch.arange(12.0).reshape(3, 4),
        "b": torch.arange(6).reshape(2, 3).bfloat16(),
        "c": torch.ones(2),
    }
    (directory / "config.json").write_text(json.dumps(tiny_config()))
    save_file({"a": tensors["a"]}, str(directory / "m1.safetensors"))
    save_file({"b": tensors["b"], "c": tensors["c"]}, str(directory / "m2.safetensors"))
    write_index(directory, {"a": "m1.safetensors", "b": "m2.safetensors", "c": "m2.safetensors"})
    return tensors


def write_index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_indexed_shards_are_read_whole_and_sliced(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    files = open_checkpoint(tmp_path)
    assert {name: (stored.shape, stored.dtype) for name, stored in files.tensors.items()} == {
        "a": ((3, 4), "F32"), "b": ((2, 3), "BF16"), "c": ((2,), "F32"),
    }  # fmt: skip
    with tensor_reader(files) as read:
        for name, tensor in tensors.items():
            assert torch.equal(read(name), tensor)
        assert torch.equal(read("a", Slice(1, 1, 3)), tensors["a"][:, 1:3])
        assert torch.equal(read("b", Slice(0, 1, 2)), tensors["b"][1:2])


def test_header_places_are_where_the_data_lies(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    stored = read_header(tmp_path / "m1.safetensors")["a"]
    data = (tmp_path / "m1.safetensors").read_bytes()[stored.begin_bytes :][: stored.n_bytes]
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(3, 4), tensors["a"])


@pytest.mark.parametrize("n_kept", [4, 40, -1])
def test_truncated_file(tmp_path: Path, n_kept: int) -> None:
    sharded(tmp_path)
    file = tmp_path / "m2.safetensors"
    file.write_bytes(file.read_bytes()[:n_kept])
    with pytest.raises(CheckpointError, match=r"m2\.safetensors: is truncated"):
        open_checkpoint(tmp_path)


def test_file_with_bytes_after_its_data(tmp_path: Path) -> None:
    sharded(tmp_path)
    with (tmp_path / "m2.safetensors").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(CheckpointError, match="bytes after its last tensor"):
        open_checkpoint(tmp_path)


def test_header_whose_ranges_do_not_match_its_shapes(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(
        CheckpointError, match=r"x\.safetensors: a is F32 \[3\], but its byte range is 0\.\.8"
    ):
        read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("weight_map", "match"),
    [
        ({"a": "m1.safetensors", "b": "gone.safetensors"}, "files that do not exist: gone.safetensors"),
        (
            {"a": "m1.safetensors", "z": "m1.safetensors"},
            "tensors that their files do not hold: z in m1.safetensors",
        ),
        (
            {"a": "m1.safetensors", "b": "m2.safetensors"},
            "does not name tensors that its files hold: c in m2",
        ),
        ({"a": "../m1.safetensors"}, "is not a file name in this directory"),
        ({}, "weight_map: expected an object"),
    ],
)
def test_index_that_contradicts_its_files(tmp_path: Path, weight_map: dict[str, str], match: str) -> None:
    sharded(tmp_path)
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(tmp_path)


def test_single_file_beside_a_foreign_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"a": torch.zeros(1)}, str(tmp_path / "model.safetensors"))
    with pytest.raises(
        CheckpointError, match="holds both model.safetensors and model.safetensors.index.json"
    ):
        open_checkpoint(tmp_path)


def test_pickled_weights_are_refused_and_not_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(CheckpointError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "match"),
    [("{", "not valid JSON"), ("[1]", "expected a JSON object, not list"), ("\xff", "not valid JSON")],
)
def test_bad_config(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=f"config.json: .*{match}"):
        read_architecture(tmp_path)


def test_missing_config_and_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: does not exist"):
        read_architecture(tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        read_architecture(tmp_path / "nowhere")
