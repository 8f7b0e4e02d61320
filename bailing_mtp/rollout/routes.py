"""Which experts the trunk chose for every committed token, for the trainer to choose them again.

The device side has static shapes and no state: a pass of the trunk fills a record, layer by layer, and its caller
reads it. What was committed is sorted out on the host. The MTP layer's passes are given no record.

Shapes: R rows of a pass, T tokens of a prefill, L expert layers of the trunk, k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bailing_mtp.rollout.sequences import Chunk, Group, Row


class RouteRecord:
    """Choices of one pass of the trunk, on the device."""

    def __init__(self, num_experts: int) -> None:
        self._dtype = torch.uint8 if num_experts <= 256 else torch.int16
        self._layers: list[Tensor] = []

    def add(self, ids_Rk: Tensor) -> None:
        """The choices of the next expert layer."""
        self._layers.append(ids_Rk.to(self._dtype))

    def routes(self) -> Tensor:
        """[R, L, k], uint8 or int16."""
        return torch.stack(self._layers, dim=1)


class RouteLog:
    """Choices for the tokens in the caches of every sequence, on the host.

    Ranks of a tensor-parallel group keep a log each. In training a token's router runs on one of them alone, so
    that nothing depends on their logs being equal.
    """

    def __init__(self) -> None:
        self._parts: dict[Row | Group, list[np.ndarray]] = {}

    def prefilled(self, chunks: Sequence[Chunk], routes_TLk: Tensor) -> None:
        """Tokens that a prefill brought, `chunks` one after the other. A first chunk begins the sequence again."""
        routes, end = routes_TLk.cpu().numpy(), 0
        for chunk in chunks:
            begin, end = end, end + chunk.length
            if chunk.start == 0:
                self._parts[chunk.sequence] = []
            self._parts[chunk.sequence].append(routes[begin:end].copy())

    def forked(self, row: Row, group: Group) -> None:
        """A response begins with its prompt's tokens."""
        if group in self._parts:
            self._parts[row] = list(self._parts[group])

    def committed(self, row: Row, routes: np.ndarray) -> None:
        """Tokens that a step fed and kept, [n, L, k]."""
        self._parts[row].append(routes)

    def take(self, row: Row) -> np.ndarray | None:
        """All of a row that ends, cut where its response was; None where nothing was recorded."""
        parts = self._parts.pop(row, None)
        return None if parts is None else np.concatenate(parts)[: len(row.prompt_ids) + len(row.response)]

    def forget(self) -> None:
        """Drop sequences that hold no slot any more; they are recorded again when they are prefilled again."""
        self._parts = {owner: parts for owner, parts in self._parts.items() if owner.slot is not None}
