"""Which sites of a pack have a target, worked out on the host, so that heads and the MTP layer leave the others out.

Shapes: T tokens of the pack, D MTP depths, n rows of one stream, K key rows and Q asking rows of the MTP layer.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bailing_mtp.contracts.batch import TokenBatch, to_device

WORTHWHILE_SHARE = 7 / 8
"""The MTP layer runs on a part of the pack where at most this share of its sites would ask."""


@dataclass(frozen=True)
class DraftSites:
    """The sites that one pass of the MTP layer works on.

    Of a document with targets its tokens up to the last site with one are keys, and those from its first such site
    on ask: a query sees every key before it, and all that follows attention is needed only where something asks.
    Asking sites between two targets come along, so that the queries of a document are its last key rows. A pack
    without any target keeps one site, which nothing is predicted from: the layer then still takes part.
    """

    lengths: tuple[int, ...]
    """Key rows of each document that has any."""
    query_lengths: tuple[int, ...]
    """How many of them, its last ones, ask."""
    keys_K: Tensor
    """int64, the site of each key row."""
    queries_Q: Tensor
    """int64, the key row of each asking row."""
    sites_Q: Tensor
    """int64, the site of each asking row."""
    row_T: Tensor
    """int64 on the host, the asking row of each site that has one."""

    @staticmethod
    def of(batch: TokenBatch, n_depths: int) -> DraftSites | None:
        """For `n_depths` depths; None where too little of the pack could be left out."""
        host = batch.on_host()
        needed_T, cu_seqlens = _needed(host, n_depths)[1], host.layout.cu_seqlens
        sites = needed_T.nonzero().flatten()
        if not sites.numel():
            sites = torch.zeros(min(1, needed_T.numel()), dtype=torch.int64)
        document = torch.searchsorted(cu_seqlens, sites, right=True) - 1
        with_targets_N, counts_N = document.unique_consecutive(return_counts=True)
        one_past_N = counts_N.cumsum(0)
        begin_N, first_N = cu_seqlens[with_targets_N], sites[one_past_N - counts_N]
        end_N = sites[one_past_N - 1] + 1
        if float((end_N - first_N).sum()) > WORTHWHILE_SHARE * needed_T.numel() or not needed_T.numel():
            return None
        keys_K, sites_Q = _ranges(begin_N, end_N), _ranges(first_N, end_N)
        moved = [to_device(x, batch.input_ids_T.device) for x in (keys_K, _places(keys_K, needed_T)[sites_Q], sites_Q)]
        lengths, query_lengths = (tuple((end_N - begin).tolist()) for begin in (begin_N, first_N))
        return DraftSites(lengths, query_lengths, *moved, _places(sites_Q, needed_T))


class DepthRows(NamedTuple):
    """The rows of one MTP depth that meet the heads, in the order of their counterparts."""

    sites_n: Tensor
    """int64, the site of each."""
    rows_n: Tensor
    """int64, where it lies in the depth's stream."""
    partners_n: Tensor
    """int64, the place of site t + d among the trunk's rows."""
    partners: tuple[int, ...]
    """The same on the host."""


class Chunk(NamedTuple):
    """Rows begin..end-1 of the trunk, and of every depth the rows lo..hi-1 whose counterparts they are."""

    begin: int
    end: int
    depths: tuple[tuple[int, int], ...]
    trains_trunk: bool


@dataclass(frozen=True)
class HeadRows:
    """The rows that the heads work on. What they give is in this order; `sites_n` puts it back.

    First the trunk's sites with targets of their own, whatever the MTP depths need, so that the trunk's products
    do not depend on them; then sites that are only read as counterparts.
    """

    sites_n: Tensor
    """int64, site of each of the trunk's rows."""
    n_own: int
    depths: tuple[DepthRows, ...]

    @staticmethod
    def every(n_tokens: int, n_depths: int, device: torch.device) -> HeadRows:
        """All sites of the trunk, and of depth d all that have a counterpart in the pack."""
        sites_n = torch.arange(n_tokens, device=device)
        ranges = [range(min(depth, n_tokens), n_tokens) for depth in range(1, n_depths + 1)]
        depths = [
            DepthRows(*(sites_n[: len(partners)],) * 2, sites_n[partners.start :], tuple(partners))
            for partners in ranges
        ]
        return HeadRows(sites_n, n_tokens, tuple(depths))

    @staticmethod
    def of(batch: TokenBatch, n_depths: int, part: DraftSites | None = None) -> HeadRows:
        """The sites of `batch` with a target. part: what the depths' streams hold, None for every site.

        A depth also takes sites whose only target is a deeper one's: the chance of reaching that one asks for them.
        """
        host, device = batch.on_host(), batch.input_ids_T.device
        valid_T, *needed = _needed(host, n_depths)
        read_T = torch.zeros_like(valid_T)
        for depth, needed_T in enumerate(needed, start=1):
            read_T[depth:] |= needed_T[:-depth]
        own, more = valid_T.nonzero().flatten(), (read_T & ~valid_T).nonzero().flatten()
        sites = torch.cat((own, more))
        place_T = _places(sites, valid_T)
        row_T = torch.arange(valid_T.numel()) if part is None else part.row_T
        depths = []
        for depth, needed_T in enumerate(needed, start=1):
            sites_n = needed_T.nonzero().flatten()
            partners_n, order = place_T[sites_n + depth].sort()
            sites_n = sites_n[order]
            on_device = (to_device(x, device) for x in (sites_n, row_T[sites_n], partners_n))
            depths.append(DepthRows(*on_device, tuple(partners_n.tolist())))
        return HeadRows(to_device(sites, device), own.numel(), tuple(depths))

    def chunks(self, n_tokens: int) -> list[Chunk]:
        """Pieces of at most `n_tokens` of the trunk's rows, which are its own or none of its own."""
        n_rows, found = self.sites_n.numel(), []
        for first, last in ((0, self.n_own), (self.n_own, n_rows)):
            for begin in range(first, last, n_tokens):
                end = min(begin + n_tokens, last)
                spans = [tuple(bisect_left(depth.partners, at) for at in (begin, end)) for depth in self.depths]
                found.append(Chunk(begin, end, tuple(spans), begin < self.n_own))
        return found


def _needed(host: TokenBatch, n_depths: int) -> list[Tensor]:
    """bool [T] for depths 0..D: where the depth has a target; from depth 1 on, where it or a deeper one has."""
    valid = [host.shift(depth).valid_T for depth in range(n_depths + 1)]
    for depth in range(n_depths - 1, 0, -1):
        valid[depth] = valid[depth] | valid[depth + 1]
    return valid


def _places(sites: Tensor, like_T: Tensor) -> Tensor:
    """int64 [T]: the place of each site in `sites`, 0 for the others."""
    place_T = torch.zeros_like(like_T, dtype=torch.int64)
    place_T[sites] = torch.arange(sites.numel())
    return place_T


def _ranges(begin_N: Tensor, end_N: Tensor) -> Tensor:
    """begin..end-1 of every pair, joined."""
    lengths_N = end_N - begin_N
    before_N = lengths_N.cumsum(0) - lengths_N
    return torch.arange(int(lengths_N.sum())) + torch.repeat_interleave(begin_N - before_N, lengths_N)
