"""Which tokens of which sequences one prefill brings, packed, and the kernel set that it runs with.

Shape legend: T tokens of the pack, X keys of its segments (prefixes included), s segments.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bailing_mtp.kernels.reference.kda_prefill import Pack, chunk_table
from bailing_mtp.rollout.transfer import all_to_device

_KERNELS = {"torch": "bailing_mtp.kernels.reference.prefill", "triton": "bailing_mtp.kernels.prefill"}


def prefill_kernels(name: Literal["torch", "triton"], dtype: torch.dtype) -> ModuleType:
    """The set for rollout.kernels=`name` and weights of `dtype`, with the names of kernels.reference.prefill.

    Weights in fp32 are prefilled by the torch twins whatever the name: fla multiplies in tf32, and flash attention
    takes 16 bits only. Importing the GPU set takes seconds.
    """
    return importlib.import_module(_KERNELS["torch" if dtype is torch.float32 else name])


class Segment(NamedTuple):
    """`length` consecutive tokens of a sequence, the first at position `start`; what is before is prefilled."""

    slot: int
    start: int
    length: int


@dataclass(frozen=True)
class PrefillPlan:
    """Host and device form of a pack of segments."""

    segments: tuple[Segment, ...]
    pack: Pack
    slots_s: Tensor
    """int64."""
    ends_s: Tensor
    """int64, tokens of each sequence after this prefill."""
    continues_s: Tensor | None
    """bool, whether a segment has a start > 0; None if none has."""
    slot_T: Tensor
    """int64."""
    position_T: Tensor
    """int64."""
    key_slot_X: Tensor
    """int64, slot of each key; the keys of a segment are all positions up to its last."""
    key_position_X: Tensor

    @staticmethod
    def build(segments: Sequence[Segment | tuple[int, int, int]], device: torch.device) -> PrefillPlan:
        """Pack `segments`, of at least one token each, in their order."""
        found = tuple(Segment(*segment) for segment in segments)
        assert found and all(part.length > 0 and part.start >= 0 for part in found), found
        starts, lengths = [part.start for part in found], [part.length for part in found]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        slots_s = torch.tensor([part.slot for part in found])

        def positions(first: list[int], last: list[int]) -> Tensor:
            return torch.cat([torch.arange(a, b) for a, b in zip(first, last, strict=True)])

        chunks_M2 = chunk_table(tuple(lengths))
        tensors = {
            "cu_seqlens": torch.tensor([0, *accumulate(lengths)]),
            "key_ends": torch.tensor([0, *accumulate(ends)]),
            "segment_T": torch.arange(len(found)).repeat_interleave(torch.tensor(lengths)),
            "chunks_M2": chunks_M2,
            "chunk_offsets": torch.tensor([0, *chunks_M2[:, 0].bincount().cumsum(0).tolist()]),
            "starts_s": torch.tensor(starts),
            "slots_s": slots_s,
            "ends_s": torch.tensor(ends),
            "slot_T": slots_s.repeat_interleave(torch.tensor(lengths)),
            "position_T": positions(starts, ends),
            "key_slot_X": slots_s.repeat_interleave(torch.tensor(ends)),
            "key_position_X": positions([0] * len(ends), ends),
        }
        there = all_to_device(tensors, device)
        continues_s = there.pop("starts_s") > 0
        cu_seqlens, key_ends = there.pop("cu_seqlens"), there.pop("key_ends")
        pack = Pack(
            lengths=tuple(lengths),
            key_lengths=tuple(ends),
            cu_seqlens=cu_seqlens,
            segment_T=there.pop("segment_T"),
            chunks_M2=there.pop("chunks_M2"),
            chunk_offsets=there.pop("chunk_offsets"),
            query_ends=cu_seqlens.to(torch.int32),
            key_ends=key_ends.to(torch.int32),
        )
        return PrefillPlan(found, pack, continues_s=continues_s if any(starts) else None, **there)

    @property
    def lengths(self) -> tuple[int, ...]:
        """New tokens of each segment."""
        return self.pack.lengths

    @property
    def n_tokens(self) -> int:
        return sum(self.lengths)
