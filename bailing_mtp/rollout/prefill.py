"""Which tokens of which sequences one prefill brings, packed.

Shape legend: T tokens of the pack, X keys of its segments (prefixes included), s segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from bailing_mtp.rollout.transfer import to_device


class Segment(NamedTuple):
    """`length` consecutive tokens of a sequence, the first at position `start`; what is before is prefilled."""

    slot: int
    start: int
    length: int


@dataclass(frozen=True)
class PrefillPlan:
    """Host and device form of a pack of segments."""

    segments: tuple[Segment, ...]
    cu_seqlens: Tensor
    """int64 [s + 1]."""
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

        tensors = {
            "cu_seqlens": torch.tensor([0, *accumulate(lengths)]),
            "slots_s": slots_s,
            "ends_s": torch.tensor(ends),
            "slot_T": slots_s.repeat_interleave(torch.tensor(lengths)),
            "position_T": positions(starts, ends),
            "key_slot_X": slots_s.repeat_interleave(torch.tensor(ends)),
            "key_position_X": positions([0] * len(ends), ends),
        }
        continues_s = to_device(torch.tensor(starts) > 0, device) if any(starts) else None
        on_device = {name: to_device(tensor, device) for name, tensor in tensors.items()}
        return PrefillPlan(segments=found, continues_s=continues_s, **on_device)

    @property
    def lengths(self) -> tuple[int, ...]:
        """New tokens of each segment."""
        return tuple(part.length for part in self.segments)

    @property
    def key_lengths(self) -> tuple[int, ...]:
        """All tokens of each segment's sequence so far."""
        return tuple(part.start + part.length for part in self.segments)

    @property
    def n_tokens(self) -> int:
        return sum(self.lengths)
