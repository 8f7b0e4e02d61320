"""Reads any block of a stored tensor, and shows a sharded checkpoint under its HF names.

So everything that reads an HF directory (loading in any layout, export, doctor, grafting) reads these too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.weights.names import Shape, Shard, mtp_map, trunk_map
from bailing_mtp.weights.sharded.chunks import CHUNK_DTYPES, Chunk, read_index, read_rows
from bailing_mtp.weights.sharded.manifest import check_files, is_sharded
from bailing_mtp.weights.sharded.sections import Block, hf_blocks
from bailing_mtp.weights.stored import CONFIG_NAME, TORCH_DTYPES, CheckpointError, StoredTensor, read_json

STATE_NAME = "state.json"
PASSED_NAME = "passed_through.safetensors"
READ_BYTES = 1 << 25
"""Whole rows are read this much at a time where only some of their columns are wanted."""


class HfBlock(NamedTuple):
    """Where the elements of one HF tensor are stored."""

    key: str
    block: Block
    shape: Shape
    """As HF has it."""


@dataclass(frozen=True)
class ShardedCheckpoint:
    """An opened checkpoint of this package: its parts are complete and of the right size, not yet digested."""

    directory: Path
    config: Mapping[str, Any]
    """config.json, as an HF directory has it."""
    state: Mapping[str, Any]
    """state.json: what is no tensor."""
    index: Mapping[str, list[Chunk]]
    hf: Mapping[str, HfBlock]

    def read(self, key: str, block: Block) -> Tensor:
        """A block [rows, cols] of a stored tensor, on the CPU. Raises CheckpointError if it is not there."""
        if key not in self.index:
            raise CheckpointError(f"{self.directory}: does not hold {key}")
        out = torch.empty((block.rows, block.cols), dtype=CHUNK_DTYPES[self.index[key][0].dtype])
        n_filled = sum(self._copy(chunk, block, out) for chunk in self.index[key])
        if n_filled != out.numel():
            raise CheckpointError(f"{self.directory}: {key} is not stored where rows {block} of it should be")
        return out

    def hf_tensors(self) -> dict[str, StoredTensor]:
        """Places of the tensors that are stored under HF names, in name order."""
        found = {}
        for name, (key, block, shape) in self.hf.items():
            first = min(self.index[key], key=lambda chunk: _distance(chunk, block))
            n_bytes = block.rows * block.cols * TORCH_DTYPES[first.dtype].itemsize
            file = self.directory / first.file
            found[name] = StoredTensor(file, first.dtype, shape, first.begin_bytes, n_bytes)
        return found

    def _copy(self, chunk: Chunk, block: Block, out: Tensor) -> int:
        """Copy what a chunk and a block have in common; returns the number of elements."""
        held = _block_of(chunk)
        top, bottom = max(held.row, block.row), min(held.row + held.rows, block.row + block.rows)
        left, right = max(held.col, block.col), min(held.col + held.cols, block.col + block.cols)
        if top >= bottom or left >= right:
            return 0
        row_bytes = held.cols * out.element_size()
        step = max(1, READ_BYTES // row_bytes)
        for first in range(top, bottom, step):
            stop = min(bottom, first + step)
            rows = read_rows(self.directory, chunk, first - held.row, stop - held.row)
            part = rows.view(stop - first, held.cols)[:, left - held.col : right - held.col]
            out[first - block.row : stop - block.row, left - block.col : right - block.col] = part
        return (bottom - top) * (right - left)


def open_sharded(directory: Path) -> ShardedCheckpoint:
    """Open a checkpoint of this package. Raises CheckpointError; see manifest.verify for flipped bits."""
    if not is_sharded(directory):
        raise CheckpointError(f"{directory}: is no sharded checkpoint of this package")
    check_files(directory)
    config = read_json(directory / CONFIG_NAME)
    arch = Architecture.from_hf(config, str(directory / CONFIG_NAME))
    maps = trunk_map(arch, Shard()) | {
        f"mtp.{name}": param for name, param in mtp_map(replace(arch, num_mtp_layers=1), Shard()).items()
    }
    shapes = {piece.hf_name: piece.hf_shape for param in maps.values() for piece in param.pieces}
    index = read_index(directory)
    hf = {name: HfBlock(key, block, shapes[name]) for name, (key, block) in hf_blocks(maps).items() if key in index}
    return ShardedCheckpoint(directory, config, read_json(directory / STATE_NAME), index, hf)


def _block_of(chunk: Chunk) -> Block:
    col, cols = (chunk.offset[1], chunk.sizes[1]) if len(chunk.sizes) > 1 else (0, 1)
    return Block(chunk.offset[0], chunk.sizes[0], col, cols)


def _distance(chunk: Chunk, block: Block) -> tuple[int, int]:
    """Smallest for the chunk that holds the first element of a block."""
    held = _block_of(chunk)
    holds = held.row <= block.row < held.row + held.rows and held.col <= block.col < held.col + held.cols
    return (0 if holds else 1, math.prod(chunk.offset))
