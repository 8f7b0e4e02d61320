"""Writes safetensors files tensor by tensor: headers are planned first, so no file is held in memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self

import torch
from torch import Tensor

from bailing_mtp.weights.checkpoint_files import INDEX_NAME, SINGLE_NAME, TORCH_DTYPES
from bailing_mtp.weights.names import Shape

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of an output checkpoint."""

    name: str
    shape: Shape
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class _ShardFile:
    name: str = ""
    tensors: list[PlannedTensor] = field(default_factory=list)

    @property
    def n_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)


class ShardWriter:
    """Writes planned tensors, in the planned order, into one file or into shards with an index.

    A context manager; `finish` must be called after the last tensor.
    """

    def __init__(self, directory: Path, plan: Sequence[PlannedTensor], max_shard_bytes: int) -> None:
        """`max_shard_bytes`: data bytes of one file; a larger tensor gets a file of its own."""
        assert max_shard_bytes > 0 and len({tensor.name for tensor in plan}) == len(plan)
        self._directory = directory
        self._shards = _assign(plan, max_shard_bytes)
        self._queue = [(shard, tensor) for shard in self._shards for tensor in shard.tensors]
        self._n_written = 0
        self._open_shard: _ShardFile | None = None
        self._stream: BinaryIO | None = None
        self._begin: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_file()

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next planned tensor, cast to its planned dtype."""
        shard, planned = self._queue[self._n_written]
        assert name == planned.name and tuple(tensor.shape) == planned.shape, (name, tensor.shape, planned)
        if shard is not self._open_shard:
            self._close_file()
            self._open_file(shard)
        assert self._stream is not None
        data = tensor.to(device="cpu", dtype=planned.dtype).contiguous().reshape(-1).view(torch.uint8)
        self._stream.seek(self._begin[name])
        self._stream.write(memoryview(data.numpy()))
        self._n_written += 1

    def finish(self) -> tuple[str, ...]:
        """Close the last file and write the index; returns the weight files' names."""
        assert self._n_written == len(self._queue), (
            f"{self._n_written} of {len(self._queue)} tensors were written"
        )
        self._close_file()
        if len(self._shards) > 1:
            weight_map = {tensor.name: shard.name for shard, tensor in self._queue}
            total_bytes = sum(shard.n_bytes for shard in self._shards)
            index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (self._directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return tuple(shard.name for shard in self._shards)

    def _open_file(self, shard: _ShardFile) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        relative = {}
        # Wide dtypes first, so that every tensor is aligned to its item size; readers map the file.
        for tensor in sorted(shard.tensors, key=lambda tensor: -tensor.dtype.itemsize):
            offsets = [end, end + tensor.n_bytes]
            header[tensor.name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": offsets,
            }
            relative[tensor.name], end = offsets
        text = json.dumps(header, separators=(",", ":")).encode("utf-8")
        text += b" " * (-len(text) % 8)
        self._begin = {name: 8 + len(text) + begin for name, begin in relative.items()}
        self._open_shard = shard
        self._stream = (self._directory / shard.name).open("wb")
        self._stream.write(len(text).to_bytes(8, "little") + text)

    def _close_file(self) -> None:
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
        self._stream = self._open_shard = None


def _assign(plan: Sequence[PlannedTensor], max_shard_bytes: int) -> list[_ShardFile]:
    shards: list[_ShardFile] = []
    used_bytes = 0
    for tensor in plan:
        if not shards or used_bytes + tensor.n_bytes > max_shard_bytes:
            shards.append(_ShardFile())
            used_bytes = 0
        shards[-1].tensors.append(tensor)
        used_bytes += tensor.n_bytes
    for number, shard in enumerate(shards, start=1):
        shard.name = (
            SINGLE_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
    return shards
