"""The data files of a sharded checkpoint: torch's distributed checkpoint format, read without pickle.

Each rank writes one file of tensors, each as `torch.save` writes it. Where they lie is written twice:
`index.json`, which is what is read here, and `.metadata`, with which megatron-core's dist_checkpointing and
torch.distributed.checkpoint read the same files. `.metadata` is a pickle, so it is never opened here.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from bailing_mtp.weights.names import Shape
from bailing_mtp.weights.stored import TORCH_DTYPES, CheckpointError, read_json

# Optimizer states may also be 8-bit codes.
CHUNK_DTYPES = TORCH_DTYPES | {"U8": torch.uint8}
DTYPE_NAMES = {dtype: name for name, dtype in CHUNK_DTYPES.items()}
INDEX_NAME = "index.json"
TORCH_METADATA_NAME = ".metadata"
COMMON_NAME = "common_0.distcp"


@dataclass(frozen=True)
class Chunk:
    """One stored block of a tensor, and where it lies."""

    key: str
    dtype: str
    shape: Shape
    """Of the whole tensor."""
    offset: Shape
    sizes: Shape
    file: str
    begin_bytes: int
    """Of what torch.save wrote."""
    n_bytes: int


class FileDigest(NamedTuple):
    """A finished file."""

    n_bytes: int
    sha256: str


class ChunkWriter:
    """Writes one file of chunks and its digest in the same pass. A context manager."""

    def __init__(self, file: Path) -> None:
        self._name = file.name
        self._stream = file.open("wb")
        self._sha256 = hashlib.sha256()
        self._n_bytes = 0
        self.chunks: list[Chunk] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def put(self, key: str, shape: Shape, offset: Shape, tensor: Tensor) -> None:
        """Append a block of the tensor `key`. `tensor`: on the CPU, contiguous, its storage all its own."""
        assert tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes, key
        begin = self._n_bytes
        torch.save(tensor.detach(), self)
        place = (self._name, begin, self._n_bytes - begin)
        self.chunks.append(Chunk(key, DTYPE_NAMES[tensor.dtype], shape, offset, tuple(tensor.shape), *place))

    def write(self, data: Any) -> int:
        """What torch.save calls."""
        self._sha256.update(data)
        self._stream.write(data)
        size = memoryview(data).nbytes
        self._n_bytes += size
        return size

    def flush(self) -> None:
        self._stream.flush()

    def finish(self) -> FileDigest:
        """Make the file durable; returns its digest."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return FileDigest(self._n_bytes, self._sha256.hexdigest())


def digest_of(file: Path) -> FileDigest:
    """Read a file once."""
    with file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256")
    return FileDigest(file.stat().st_size, sha256.hexdigest())


def write_index(directory: Path, chunks: Iterable[Chunk]) -> None:
    """Write index.json, .metadata and metadata.json for all ranks' chunks."""
    tensors: dict[str, dict[str, Any]] = {}
    for chunk in chunks:
        entry = tensors.setdefault(chunk.key, {"dtype": chunk.dtype, "shape": chunk.shape, "chunks": []})
        if (entry["dtype"], entry["shape"]) != (chunk.dtype, chunk.shape):
            raise CheckpointError(f"{directory}: parts of {chunk.key} differ in dtype or shape")
        entry["chunks"].append({name: asdict(chunk)[name] for name in _PLACE})
    (directory / INDEX_NAME).write_text(json.dumps({"tensors": tensors}), encoding="utf-8")
    common = _write_common(directory)
    with (directory / TORCH_METADATA_NAME).open("wb") as stream:
        pickle.dump(_torch_metadata(tensors, *common), stream)
    save_config(CheckpointingConfig("torch_dist"), str(directory))


def read_index(directory: Path) -> dict[str, list[Chunk]]:
    """Tensor name -> its chunks. Raises CheckpointError for anything that is not as it was written."""
    source = directory / INDEX_NAME
    index: dict[str, list[Chunk]] = {}
    for key, entry in read_json(source).get("tensors", {}).items():
        index[key] = [_chunk(source, key, entry, place) for place in entry["chunks"]]
        size = sum(math.prod(chunk.sizes) for chunk in index[key])
        if size != math.prod(index[key][0].shape):
            raise CheckpointError(f"{source}: the parts of {key} hold {size} elements, not {entry['shape']}")
    return index


def read_rows(directory: Path, chunk: Chunk, first: int, stop: int) -> Tensor:
    """Rows first..stop-1 of a chunk (one dimension: elements), on the CPU, reading no other byte of it."""
    dtype = CHUNK_DTYPES[chunk.dtype]
    row_bytes = math.prod(chunk.sizes[1:]) * dtype.itemsize
    rows = torch.empty((stop - first, *chunk.sizes[1:]), dtype=dtype)
    file = directory / chunk.file
    with file.open("rb") as stream:
        stream.seek(_data_begin(stream, file, chunk) + first * row_bytes)
        view = memoryview(rows.view(-1).view(torch.uint8).numpy())
        if stream.readinto(view) != rows.nbytes:
            raise CheckpointError(f"{file}: ends inside {chunk.key}")
    return rows


_PLACE = ("offset", "sizes", "file", "begin_bytes", "n_bytes")


def _chunk(source: Path, key: str, entry: Mapping[str, Any], place: Mapping[str, Any]) -> Chunk:
    try:
        shape, offset, sizes = (tuple(map(int, part)) for part in (entry["shape"], place["offset"], place["sizes"]))
        chunk = Chunk(
            key, entry["dtype"], shape, offset, sizes, place["file"], int(place["begin_bytes"]), int(place["n_bytes"])
        )
        inside = all(0 <= a and 0 < n and a + n <= whole for a, n, whole in zip(offset, sizes, shape, strict=True))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: entry of {key} is invalid") from error
    is_name = isinstance(chunk.file, str) and Path(chunk.file).name == chunk.file
    if not inside or not is_name or chunk.dtype not in CHUNK_DTYPES or chunk.begin_bytes < 0:
        raise CheckpointError(f"{source}: entry of {key} is invalid")
    return chunk


def _data_begin(stream: io.BufferedReader, file: Path, chunk: Chunk) -> int:
    """Where the elements lie in what torch.save wrote: an archive whose record data/0 is stored as it is."""
    expected = math.prod(chunk.sizes) * CHUNK_DTYPES[chunk.dtype].itemsize
    stream.seek(chunk.begin_bytes)
    try:
        with zipfile.ZipFile(_Window(stream, chunk.begin_bytes, chunk.n_bytes)) as archive:
            (record,) = (info for info in archive.infolist() if info.filename.endswith("/data/0"))
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise CheckpointError(f"{file}: what should be {chunk.key} is damaged") from error
    if record.compress_type != zipfile.ZIP_STORED or record.file_size != expected:
        raise CheckpointError(f"{file}: {chunk.key} has {record.file_size} bytes, expected {expected}")
    stream.seek(chunk.begin_bytes + record.header_offset + _ZIP_LENGTHS)
    name_bytes, extra_bytes = (int.from_bytes(stream.read(2), "little") for _ in range(2))
    header_bytes = _ZIP_LENGTHS + 4 + name_bytes + extra_bytes
    return chunk.begin_bytes + record.header_offset + header_bytes


_ZIP_LENGTHS = 26
"""In a zip file's local header, where the lengths of the name and of the extra field stand."""


class _Window(io.RawIOBase):
    """A part of an open file as a file of its own."""

    def __init__(self, stream: io.BufferedReader, begin: int, size: int) -> None:
        self._stream, self._begin, self._size, self._at = stream, begin, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        self._stream.seek(self._begin + self._at)
        data = self._stream.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


def _write_common(directory: Path) -> tuple[str, _StorageInfo]:
    """megatron-core wants an object of values that are no tensors; ours stand in JSON files, so it is empty."""
    key = ShardedObject("common_state", None, (1,), (0,)).unique_key
    stream = io.BytesIO()
    torch.save([{}], stream)
    (directory / COMMON_NAME).write_bytes(stream.getvalue())
    return key, _StorageInfo(COMMON_NAME, 0, stream.tell())


def _torch_metadata(tensors: Mapping[str, Any], common_key: str, common_place: _StorageInfo) -> Metadata:
    described: dict[str, Any] = {common_key: BytesStorageMetadata()}
    places = {MetadataIndex(common_key): common_place}
    for key, entry in tensors.items():
        described[key] = TensorStorageMetadata(
            properties=TensorProperties(dtype=CHUNK_DTYPES[entry["dtype"]]),
            size=torch.Size(entry["shape"]),
            chunks=[
                ChunkStorageMetadata(torch.Size(place["offset"]), torch.Size(place["sizes"]))
                for place in entry["chunks"]
            ],
        )
        for index, place in enumerate(entry["chunks"]):
            info = _StorageInfo(place["file"], place["begin_bytes"], place["n_bytes"])
            places[MetadataIndex(key, torch.Size(place["offset"]), index)] = info
    return Metadata(state_dict_metadata=described, storage_data=places)
