"""A list of flat tensors cut into pieces of one size, so that a compiled update of one piece serves all of them.

What fills whole pieces of a tensor is updated where it lies. The rests are packed behind each other, every one from a
multiple of BLOCK on, and are copied through a buffer; so a quantised block never holds elements of two tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BLOCK = 256
"""Elements that share a scale."""


class Part(NamedTuple):
    """Elements start..stop-1 of tensor number `index`, from `begin` on in a piece."""

    index: int
    start: int
    stop: int
    begin: int


class Piece(NamedTuple):
    """`size` elements, some of which may belong to no tensor. A piece in place is one part that fills it."""

    size: int
    parts: tuple[Part, ...]
    in_place: bool


def cut(sizes: Sequence[int], piece_elements: int) -> list[Piece]:
    """Pieces of `piece_elements` (a multiple of BLOCK) that hold tensors of these sizes; those in place come first.

    Where the rests of all tensors fit into one piece and no other exists, it is only as large as they are.
    """
    assert piece_elements % BLOCK == 0, piece_elements
    in_place = [
        Piece(piece_elements, (Part(index, start, start + piece_elements, 0),), True)
        for index, size in enumerate(sizes)
        for start in range(0, size - piece_elements + 1, piece_elements)
    ]
    packed: list[list[Part]] = [[]]
    at = 0
    for index, size in enumerate(sizes):
        start = size - size % piece_elements
        while start < size:
            if at == piece_elements:
                packed.append([])
                at = 0
            n = min(size - start, piece_elements - at)
            packed[-1].append(Part(index, start, start + n, at))
            start += n
            at += -(-n // BLOCK) * BLOCK
    packed_elements = piece_elements if in_place or len(packed) > 1 else at
    return in_place + [Piece(packed_elements, tuple(parts), False) for parts in packed if parts]
