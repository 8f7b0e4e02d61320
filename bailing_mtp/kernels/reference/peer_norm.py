"""Residual + the sum of every rank's part, and the norm of that: what is computed, and where the parts travel.

Shape legend: R rows, H channels, W ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bailing_mtp.kernels.reference.norm import add_rms_norm

MOST_ROWS = 768
"""Rows of all other ranks together up to which a sum and its norm are one launch. On two H200s, for rows of 1536 in
bf16, it takes 2.8, 4.2, 7.6 and 16.9 us at 1, 64, 256 and 768 rows, a sum over peer memory and the norm 7.7, 9.6, 13.8
and 20.1."""


class Mailboxes(NamedTuple):
    """addresses_W: int64, of every rank's mailbox as this one sees it; zeros before the first exchange. number_R:
    int32 [rows], how many exchanges each row has had. rank: this one among them."""

    addresses_W: Tensor
    number_R: Tensor
    rank: int

    @staticmethod
    def rows(ranks: int, rows: int) -> int:
        """Of `rows`, those that there are mailboxes for."""
        return min(rows, MOST_ROWS // max(1, ranks - 1))

    @staticmethod
    def words(ranks: int, rows: int, H: int, itemsize: int) -> int:
        """Words of eight bytes of a mailbox for `rows` rows: four bytes of a row and a number, for two exchanges."""
        return 2 * ranks * rows * (H * itemsize // 4)


def add_rms_norm_of_parts(x_RH: Tensor, parts_WRH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Parts are added in fp32 in the order of the ranks and rounded once, as one rank's sum would be."""
    total_RH = torch.zeros_like(x_RH, dtype=torch.float32)
    for part_RH in parts_WRH:
        total_RH += part_RH
    return add_rms_norm(x_RH, total_RH.to(x_RH.dtype), weight_H, eps)
