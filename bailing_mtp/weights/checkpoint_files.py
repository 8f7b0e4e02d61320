"""A checkpoint directory: its config, and where each tensor lies under its HF name. Headers only, no data.

Two kinds are opened alike: Hugging Face directories, and this package's own sharded checkpoints
(weights/sharded).

The safetensors format: 8 bytes little-endian header length, a JSON header (name -> dtype, shape, byte range
relative to the end of the header), then the data without holes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.weights.names import Slice
from bailing_mtp.weights.sharded.manifest import is_sharded
from bailing_mtp.weights.sharded.reader import PASSED_NAME, ShardedCheckpoint, open_sharded
from bailing_mtp.weights.sharded.sections import Block
from bailing_mtp.weights.stored import (
    CONFIG_NAME,
    TORCH_DTYPES,
    CheckpointError,
    StoredTensor,
    parse_object,
    read_json,
)

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class CheckpointFiles:
    """What a checkpoint directory holds."""

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    sharded: ShardedCheckpoint | None = None
    """Set for a checkpoint of this package; None for an HF directory."""


def open_checkpoint(directory: Path) -> CheckpointFiles:
    """Read the config and all tensor headers of a directory of either kind.

    Raises CheckpointError: no config, invalid JSON, only pickled weights, a tensor or shard of the index that
    is not there, a truncated file.
    """
    config = read_config(directory)
    if is_sharded(directory):
        sharded = open_sharded(directory)
        passed = directory / PASSED_NAME
        tensors = sharded.hf_tensors() | (read_header(passed) if passed.exists() else {})
        return CheckpointFiles(directory, config, tensors, sharded)
    single, index = directory / SINGLE_NAME, directory / INDEX_NAME
    if index.exists():
        weight_map = _read_weight_map(index)
        if single.exists() and SINGLE_NAME not in weight_map.values():
            raise CheckpointError(
                f"{directory}: holds both {SINGLE_NAME} and {INDEX_NAME}; remove the one that is stale"
            )
        tensors = _read_indexed(index, weight_map)
    elif single.exists():
        tensors = read_header(single)
    else:
        raise _no_weights(directory)
    return CheckpointFiles(directory, config, tensors)


def read_config(directory: Path) -> dict[str, Any]:
    """The HF config.json of a checkpoint directory. Raises CheckpointError."""
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory}: is not a directory; expected a checkpoint directory with {CONFIG_NAME}"
        )
    return read_json(directory / CONFIG_NAME)


def read_architecture(directory: Path) -> Architecture:
    """Sizes of the model in an HF directory.

    Raises CheckpointError for a missing or invalid config.json, UnsupportedArchitecture for what it says.
    """
    return Architecture.from_hf(read_config(directory), str(directory / CONFIG_NAME))


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Tensor name -> place, for one safetensors file. Raises CheckpointError when the file is damaged."""
    size_bytes = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size_bytes < 8 or not 2 <= header_bytes <= min(size_bytes - 8, MAX_HEADER_BYTES):
            raise CheckpointError(f"{file}: is truncated or no safetensors file ({size_bytes} bytes)")
        header = parse_object(stream.read(header_bytes), f"{file} (header)")
    header.pop("__metadata__", None)
    data_begin = 8 + header_bytes
    tensors = {name: _stored(file, name, entry, data_begin) for name, entry in header.items()}
    expected_bytes = max((t.begin_bytes + t.n_bytes for t in tensors.values()), default=data_begin)
    if size_bytes != expected_bytes:
        problem = "is truncated" if size_bytes < expected_bytes else "has bytes after its last tensor"
        raise CheckpointError(f"{file}: {problem}: {size_bytes} bytes, its header says {expected_bytes}")
    return tensors


class TensorReader(Protocol):
    """Reads one tensor, or a slice of it, to the CPU in its stored dtype."""

    def __call__(self, name: str, part: Slice | None = None) -> Tensor: ...


@contextmanager
def tensor_reader(files: CheckpointFiles) -> Iterator[TensorReader]:
    """A reader that holds no more than the tensor it returns; only the bytes asked for are read."""
    with ExitStack() as stack:
        handles: dict[Path, Any] = {}

        def read(name: str, part: Slice | None = None) -> Tensor:
            stored = files.tensors[name]
            if files.sharded is not None and name in files.sharded.hf:
                return _read_sharded(files.sharded, name, part)
            if part is None or part.dim == 0:
                return _read_rows(stored, part)
            if stored.file not in handles:
                handles[stored.file] = stack.enter_context(safe_open(str(stored.file), framework="pt"))
            view = handles[stored.file].get_slice(name)
            before = (slice(None),) * part.dim
            return view[(*before, slice(part.start, part.stop))]

        yield read


def _read_rows(stored: StoredTensor, part: Slice | None) -> Tensor:
    """Read from the file, not from a mapping of it, which would count as memory until the file is closed."""
    first, stop = (part.start, part.stop) if part is not None else (0, stored.shape[0] if stored.shape else 1)
    tail = stored.shape[1:]
    dtype = TORCH_DTYPES[stored.dtype]
    tensor = torch.empty((stop - first, *tail) if stored.shape else (), dtype=dtype)
    with stored.file.open("rb") as stream:
        stream.seek(stored.begin_bytes + first * math.prod(tail) * dtype.itemsize)
        n_read = stream.readinto(memoryview(tensor.view(-1).view(torch.uint8).numpy()))
    if n_read != tensor.nbytes:
        raise CheckpointError(f"{stored.file}: ended while it was read")
    return tensor


def _read_sharded(sharded: ShardedCheckpoint, name: str, part: Slice | None) -> Tensor:
    key, block, shape = sharded.hf[name]
    if part is None:
        return sharded.read(key, block).reshape(shape)
    start, size = part.start, part.stop - part.start
    if part.dim == 0:
        block = Block(block.row + start, size, block.col, block.cols)
    else:
        assert part.dim == 1 and len(shape) == 2, (name, part)
        block = Block(block.row, block.rows, block.col + start, size)
    return sharded.read(key, block).reshape(*shape[: part.dim], size, *shape[part.dim + 1 :])


def _stored(file: Path, name: str, entry: Any, data_begin: int) -> StoredTensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: header entry of {name} is invalid: {entry!r}") from error
    n_bytes = end - begin
    expected = math.prod(shape) * TORCH_DTYPES[dtype].itemsize if dtype in TORCH_DTYPES else n_bytes
    if begin < 0 or n_bytes != expected:
        raise CheckpointError(
            f"{file}: {name} is {dtype} {list(shape)}, but its byte range is {begin}..{end}"
        )
    return StoredTensor(file, dtype, shape, data_begin + begin, n_bytes)


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map: expected an object of tensor name -> file name")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(
                f"{index}: weight_map.{name}: {shard!r} is not a file name in this directory"
            )
    return weight_map


def _read_indexed(index: Path, weight_map: Mapping[str, str]) -> dict[str, StoredTensor]:
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (index.parent / shard).exists()]
    if absent:
        raise CheckpointError(f"{index}: names files that do not exist: {_listed(absent)}")
    headers = {shard: read_header(index.parent / shard) for shard in shards}
    missing = [f"{name} in {shard}" for name, shard in weight_map.items() if name not in headers[shard]]
    if missing:
        raise CheckpointError(f"{index}: names tensors that their files do not hold: {_listed(missing)}")
    unnamed = [
        f"{name} in {shard}" for shard in shards for name in headers[shard] if weight_map.get(name) != shard
    ]
    if unnamed:
        raise CheckpointError(f"{index}: does not name tensors that its files hold: {_listed(unnamed)}")
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _no_weights(directory: Path) -> CheckpointError:
    pickled = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLED_SUFFIXES)
    if pickled:
        return CheckpointError(
            f"{directory}: holds only pickled weights ({_listed(pickled)}), which can run code when they are "
            f"read; allowed: {SINGLE_NAME}, or {INDEX_NAME} with its shards"
        )
    return CheckpointError(
        f"{directory}: holds no weights; expected {SINGLE_NAME}, or {INDEX_NAME} with its shards"
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more
