"""The files of a sharded checkpoint: what is read back, who else can read them, and what is refused."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing

from bailing_mtp.weights.checkpoint_files import open_checkpoint, tensor_reader
from bailing_mtp.weights.convert import to_sharded
from bailing_mtp.weights.names import Slice
from bailing_mtp.weights.sharded.chunks import ChunkWriter, read_index, write_index
from bailing_mtp.weights.sharded.manifest import check_files, verify, write_manifest
from bailing_mtp.weights.sharded.reader import open_sharded
from bailing_mtp.weights.sharded.sections import Block
from bailing_mtp.weights.stored import CheckpointError
from tests.distributed.worlds import layout
from tests.weights.stand_in import tiny_config, write_checkpoint


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "hf", tiny_config())
    to_sharded(open_checkpoint(tmp_path / "hf"), tmp_path / "sharded", max_file_bytes=4096)
    return tmp_path / "sharded"


def flip_a_bit(directory: Path) -> str:
    file = directory / "__0_1.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return r"__0_1\.distcp: its bytes changed"


def truncate(directory: Path) -> str:
    os.truncate(directory / "__0_0.distcp", 100)
    return r"__0_0\.distcp: 100 bytes, manifest\.json says \d+"


def rename(directory: Path) -> str:
    (directory / "__0_1.distcp").rename(directory / "__0_9.distcp")
    return r"__0_1\.distcp: is missing\n__0_9\.distcp: is not in manifest\.json"


def change_config(directory: Path) -> str:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"rope_theta": 20000}, indent=2) + "\n")
    return r"config\.json: its bytes changed"


def lose_the_manifest(directory: Path) -> str:
    (directory / "manifest.json").unlink()
    return r"manifest\.json: does not exist"


def other_format(directory: Path) -> str:
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(manifest | {"version": 2}))
    return r"manifest\.json: format and version \('bailing_mtp sharded checkpoint', 2\)"


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, rename, change_config, lose_the_manifest, other_format])
def test_damage_is_refused_by_name(sharded: Path, damage: Callable[[Path], str]) -> None:
    message = damage(sharded)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(sharded)
        verify(sharded)


def test_whole_checkpoint_passes(sharded: Path) -> None:
    check_files(sharded)
    for rank in range(3):
        verify(sharded, rank, 3)


def test_ranks_share_the_digests(sharded: Path) -> None:
    flip_a_bit(sharded)
    refused = 0
    for rank in range(3):
        try:
            verify(sharded, rank, 3)
        except CheckpointError:
            refused += 1
    assert refused == 1


class Bomb:
    def __reduce__(self) -> tuple:
        return (pytest.fail, ("a pickle was opened",))


def test_no_pickle_is_ever_opened(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even under a manifest that vouches for them, the pickles are for other programs."""
    (sharded / ".metadata").write_bytes(pickle.dumps(Bomb()))
    torch.save(Bomb(), sharded / "common_0.distcp")
    (sharded / "common.pt").write_bytes(pickle.dumps(Bomb()))
    (sharded / "manifest.json").unlink()
    write_manifest(sharded, {})
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load"))
    verify(sharded)
    files = open_checkpoint(sharded)
    with tensor_reader(files) as read:
        for name in files.tensors:
            read(name)


def test_megatron_core_reads_the_same_files(sharded: Path) -> None:
    files = open_sharded(sharded)
    with layout(tp=1, ep=1):
        plain = dist_checkpointing.load_plain_tensors(str(sharded))
    assert {key for key in plain if key in files.index} == set(files.index)
    for key, chunks in files.index.items():
        rows, *cols = chunks[0].shape
        ours = files.read(key, Block(0, rows, 0, cols[0] if cols else 1)).view(chunks[0].shape)
        assert torch.equal(plain[key], ours), key


def test_hf_slices_are_those_of_the_hf_files(sharded: Path, tmp_path: Path) -> None:
    hf, ours = open_checkpoint(tmp_path / "hf"), open_checkpoint(sharded)
    assert ours.tensors.keys() == hf.tensors.keys()
    with tensor_reader(hf) as read_hf, tensor_reader(ours) as read:
        for name, stored in hf.tensors.items():
            assert (ours.tensors[name].dtype, ours.tensors[name].shape) == (stored.dtype, stored.shape)
            assert torch.equal(read(name), read_hf(name)), name
            for dim, size in enumerate(stored.shape[:2]):
                if size > 1 and (dim == 0 or len(stored.shape) == 2):
                    part = Slice(dim, size // 3, size - size // 3)
                    assert torch.equal(read(name, part), read_hf(name, part)), (name, dim)


def test_a_gap_in_the_index_is_noticed(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "__0_0.distcp") as writer:
        writer.put("w", (4, 2), (0, 0), torch.ones(2, 2))
        writer.put("w", (4, 2), (2, 0), torch.ones(1, 2))
        writer.finish()
    write_index(tmp_path, writer.chunks)
    with pytest.raises(CheckpointError, match=r"index\.json: the parts of w hold 6 elements"):
        read_index(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"file": "../evil.distcp"}, {"offset": [3, 0]}, {"sizes": [0, 2]}, {"begin_bytes": -1}, {"file": 3},
        {"offset": [0]},
    ],
)  # fmt: skip
def test_strange_index_entries_are_refused(tmp_path: Path, entry: dict) -> None:
    with ChunkWriter(tmp_path / "__0_0.distcp") as writer:
        writer.put("w", (2, 2), (0, 0), torch.ones(2, 2))
        writer.finish()
    write_index(tmp_path, writer.chunks)
    index = json.loads((tmp_path / "index.json").read_text())
    index["tensors"]["w"]["chunks"][0] |= entry
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json: entry of w is invalid"):
        read_index(tmp_path)
