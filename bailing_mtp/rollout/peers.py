"""Sums over the tensor-parallel ranks of a decode step by launches that read and write one another's memory.

Shape legend: R rows, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bailing_mtp.kernels.triton import norm, peer_norm
from bailing_mtp.parallel.collectives import PeerSum, peer_words

MAIL_ROWS = 768
"""Rows of all other ranks together up to which a sum and its norm are one launch. On two H200s, for rows of 1536 in
bf16, it takes 2.8, 4.2, 7.6 and 16.9 us at 1, 64, 256 and 768 rows, PeerSum and the norm 7.7, 9.6, 13.8 and 20.1."""


@dataclass(frozen=True)
class PeerSums:
    """All ranks of the group call with as many rows, in one order, on one stream each."""

    sums: PeerSum
    mail: peer_norm.Mailboxes
    _room: Tensor
    """This rank's mailbox, held for the others to write to."""

    @staticmethod
    def make(
        group: dist.ProcessGroup, rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> PeerSums:
        """For sums of up to `rows` rows. Collective."""
        n = min(rows, MAIL_ROWS // max(1, group.size() - 1))
        words = peer_norm.Mailboxes.words(group.size(), n, hidden_size, dtype.itemsize)
        room, addresses = peer_words(group, words, device)
        mail = peer_norm.Mailboxes(
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.zeros(n, dtype=torch.int32, device=device),
            group.rank(),
        )
        return PeerSums(PeerSum(group, rows * hidden_size, dtype, device), mail, room)

    def __call__(self, x: Tensor) -> Tensor:
        """The sum; `x` may hold it too."""
        return self.sums(x)

    def add_rms_norm(self, x_RH: Tensor, part_RH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x + the sum of the ranks' parts, and its norm; as kernels.reference.norm.add_rms_norm of that sum."""
        if x_RH.shape[0] <= self.mail.number_R.shape[0]:
            return peer_norm.exchange_add_rms_norm(x_RH, part_RH, weight_H, eps, self.mail)
        return norm.add_rms_norm(x_RH, self.sums(part_RH), weight_H, eps)
