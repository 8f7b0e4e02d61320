"""A Hugging Face checkpoint directory: its config, and where each tensor lies. Headers only, no data.

The safetensors format: 8 bytes little-endian header length, a JSON header (name -> dtype, shape, byte range
relative to the end of the header), then the data without holes.
"""

from __future__ import annotations

import json
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
from bailing_mtp.weights.names import Shape, Slice

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
MAX_HEADER_BYTES = 100_000_000


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies."""

    file: Path
    dtype: str
    """As the file spells it: BF16, F32, ..."""
    shape: Shape
    begin_bytes: int
    """From the start of the file."""
    n_bytes: int


@dataclass(frozen=True)
class CheckpointFiles:
    """What a checkpoint directory holds."""

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def open_checkpoint(directory: Path) -> CheckpointFiles:
    """Read the config and all tensor headers of an HF directory.

    Raises CheckpointError: no config, invalid JSON, only pickled weights, a tensor or shard of the index that
    is not there, a truncated file.
    """
    config = read_config(directory)
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
    return _read_json(directory / CONFIG_NAME)


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
        header = _parse_object(stream.read(header_bytes), f"{file} (header)")
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
    """A reader that opens each file once; only the bytes asked for are read."""
    with ExitStack() as stack:
        handles: dict[Path, Any] = {}

        def read(name: str, part: Slice | None = None) -> Tensor:
            stored = files.tensors[name]
            if stored.file not in handles:
                handles[stored.file] = stack.enter_context(safe_open(str(stored.file), framework="pt"))
            handle = handles[stored.file]
            if part is None or part.stop - part.start == stored.shape[part.dim]:
                return handle.get_tensor(name)
            view = handle.get_slice(name)
            before = (slice(None),) * part.dim
            return view[(*before, slice(part.start, part.stop))]

        yield read


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
    weight_map = _read_json(index).get("weight_map")
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


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path}: does not exist")
    return _parse_object(path.read_bytes(), str(path))


def _parse_object(text: bytes, source: str) -> dict[str, Any]:
    try:
        value = json.loads(text.decode("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{source}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: expected a JSON object, not {type(value).__name__}")
    return value


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more
