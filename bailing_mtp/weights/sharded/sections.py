"""Which block of which stored tensor each part of a local parameter is (a pure table, like weights/names.py).

Stored tensors have one or two dimensions and are named after the HF tensors, whose elements they hold in the
same order; the experts of a layer are stacked under one name each for gate|up and down. So a fused parameter
(KDA q|k|v|f|g|b, gate|up) is stored by section, and any layout finds its rows or columns again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.weights.names import ParamMap, ParamMaps, Piece, Shape, Shard


class Block(NamedTuple):
    """Rows row..row+rows-1 and columns col..col+cols-1 of a stored tensor; one dimension counts as rows."""

    row: int
    rows: int
    col: int
    cols: int


@dataclass(frozen=True)
class Section:
    """A contiguous part of a flattened local parameter, and the block of a stored tensor that it holds."""

    key: str
    shape: Shape
    """Of the whole stored tensor."""
    begin: int
    """First element in the flattened local parameter."""
    block: Block

    @property
    def end(self) -> int:
        return self.begin + self.block.rows * self.block.cols


@dataclass(frozen=True)
class Replicas:
    """How many ranks hold the same part of a parameter, by how it is split, and which of them this rank is."""

    tp: tuple[int, int] = (0, 1)
    """(rank, size) for parameters split by tensor parallelism."""
    ep: tuple[int, int] = (0, 1)
    none: tuple[int, int] = (0, 1)

    @staticmethod
    def of(context: ParallelContext) -> Replicas:
        experts = context.groups.expt_dp
        return Replicas(
            (context.dp_rank, context.dp), (experts.rank(), experts.size()), (context.rank, context.world_size)
        )

    def writes(self, split: str, index: int) -> bool:
        """Whether this rank stores section number `index`; the replicas take turns."""
        rank, size = getattr(self, split)
        return index % size == rank


def sections(name: str, param: ParamMap, shard: Shard) -> tuple[Section, ...]:
    """The sections of one local parameter, in the order in which they lie in it."""
    if param.split == "ep":
        return (_expert_section(name, param, shard),)
    return tuple(_section(piece) for piece in param.pieces)


def hf_blocks(maps: ParamMaps) -> dict[str, tuple[str, Block]]:
    """HF name -> stored name and block, from the table of the undivided model."""
    found = {}
    for name, param in maps.items():
        for piece in param.pieces:
            if param.split == "ep":
                expert, rows = piece.lands[0].start, param.shape[1]
                first, stop = (piece.lands[1].start, piece.lands[1].stop) if len(piece.lands) > 1 else (0, rows)
                block = Block(expert * rows + first, stop - first, 0, param.shape[2])
                found[piece.hf_name] = (_expert_key(name, param), block)
            else:
                n_rows, n_cols = _matrix(piece.hf_shape)
                found[piece.hf_name] = (piece.hf_name, Block(0, n_rows, 0, n_cols))
    return found


def stored_shapes(maps: ParamMaps) -> dict[str, Shape]:
    """Stored name -> shape, from the table of the undivided model."""
    return {s.key: s.shape for name, param in maps.items() for s in sections(name, param, Shard())}


def rectangles(section: Section, start: int, stop: int) -> Iterator[tuple[int, int, Block]]:
    """Elements start..stop-1 of the flattened parameter that lie in `section`, as blocks of the stored tensor.

    Yields (first element, one past the last, block); at most three: a row's rest, whole rows, a row's beginning.
    """
    row0, _, col0, cols = section.block
    at, stop = max(start, section.begin), min(stop, section.end)
    while at < stop:
        row, col = divmod(at - section.begin, cols)
        whole_rows = (stop - at) // cols if col == 0 else 0
        size = whole_rows * cols if whole_rows else min(cols - col, stop - at)
        block = Block(row0 + row, max(1, whole_rows), col0 + col, cols if whole_rows else size)
        yield at, at + size, block
        at += size


def _section(piece: Piece) -> Section:
    n_rows, n_cols = _matrix(piece.hf_shape)
    dim, start, stop = piece.held
    block = Block(start, stop - start, 0, n_cols) if dim == 0 else Block(0, n_rows, start, stop - start)
    assert len(piece.lands) <= 1 and all(land.dim == 0 for land in piece.lands), piece
    begin = piece.lands[0].start * n_cols if piece.lands else 0
    shape = (n_rows,) if len(piece.hf_shape) == 1 else (n_rows, n_cols)
    return Section(piece.hf_name, shape, begin, block)


def _expert_section(name: str, param: ParamMap, shard: Shard) -> Section:
    n_local, rows, cols = param.shape
    shape = (shard.ep * n_local * rows, cols)
    block = Block(shard.ep_rank * n_local * rows, n_local * rows, 0, cols)
    return Section(_expert_key(name, param), shape, 0, block)


def _expert_key(name: str, param: ParamMap) -> str:
    return param.pieces[0].hf_name.partition(".experts.")[0] + ".experts." + name.rpartition(".")[2]


def _matrix(shape: Shape) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])
