"""Which experts the trunk chose for every committed token, for the trainer to choose them again.

The device side has static shapes and no state: a pass of the trunk fills a record, layer by layer, and its caller
reads it. What was committed is sorted out on the host. The MTP layer's passes are given no record.

Shapes: R rows of a pass, T tokens of a prefill, L expert layers of the trunk, k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.rollout.sequences import Chunk, Group, Row
from bailing_mtp.rollout.transfer import Pending


class RouteFormat(NamedTuple):
    """What a token's record looks like."""

    n_layers: int
    """Expert layers of the trunk (L)."""
    per_token: int
    """Experts of a token (k)."""
    dtype: torch.dtype

    @staticmethod
    def of(arch: Architecture) -> RouteFormat:
        dtype = torch.uint8 if arch.num_experts <= 256 else torch.int16
        return RouteFormat(arch.n_expert_layers, arch.experts_per_token, dtype)

    def words(self, S: int) -> int:
        """int32 words that hold S tokens."""
        return -(-S * self.n_layers * self.per_token * self.dtype.itemsize // 4)

    def unpack(self, words_nW: Tensor, S: int) -> np.ndarray:
        """[n, S, L, k] of words on the host."""
        shape = (S, self.n_layers, self.per_token)
        ids_nX = words_nW.contiguous().view(self.dtype)[:, : S * self.n_layers * self.per_token]
        return ids_nX.unflatten(1, shape).numpy()


def pack_routes(routes_nSLk: Tensor) -> Tensor:
    """int32 [n, W]: the bits of the records of each row."""
    ids_nX = routes_nSLk.flatten(1)
    return F.pad(ids_nX, (0, -ids_nX.shape[1] % (4 // ids_nX.dtype.itemsize))).view(torch.int32)


class RouteRecord:
    """Choices of one pass of the trunk, on the device."""

    def __init__(self, dtype: torch.dtype) -> None:
        """dtype: uint8 or int16, whichever holds the expert ids."""
        self._dtype = dtype
        self._layers: list[Tensor] = []

    def add(self, ids_Rk: Tensor) -> None:
        """The choices of the next expert layer."""
        self._layers.append(ids_Rk.to(self._dtype))

    def routes(self) -> Tensor:
        """[R, L, k], uint8 or int16."""
        return torch.stack(self._layers, dim=1)


class _Prefilled(NamedTuple):
    """Tokens begin .. end - 1 of a prefill that the host need not have waited for."""

    pending: Pending
    begin: int
    end: int

    def routes(self) -> np.ndarray:
        """[n, L, k]; waits for the transfer."""
        return self.pending.wait().numpy()[self.begin : self.end]


class RouteLog:
    """Choices for the tokens in the caches of every sequence, on the host.

    Ranks of a tensor-parallel group keep a log each. In training a token's router runs on one of them alone, so
    that nothing depends on their logs being equal.
    """

    def __init__(self) -> None:
        self._parts: dict[Row | Group, list[np.ndarray | _Prefilled]] = {}

    def prefilled(self, chunks: Sequence[Chunk], routes_TLk: Tensor) -> None:
        """Tokens that a prefill brought, `chunks` one after the other. A first chunk begins the sequence again."""
        pending, end = Pending(routes_TLk), 0
        for chunk in chunks:
            begin, end = end, end + chunk.length
            if chunk.start == 0:
                self._parts[chunk.sequence] = []
            self._parts[chunk.sequence].append(_Prefilled(pending, begin, end))

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
        if parts is None:
            return None
        found = [part.routes() if isinstance(part, _Prefilled) else part for part in parts]
        return np.concatenate(found)[: len(row.prompt_ids) + len(row.response)]

    def forget(self) -> None:
        """Drop sequences that hold no slot any more; they are recorded again when they are prefilled again."""
        self._parts = {owner: parts for owner, parts in self._parts.items() if owner.slot is not None}
