"""Sums over the tensor-parallel ranks of a decode step by launches that read and write one another's memory.

Shape legend: R rows, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bailing_mtp.errors import UserError
from bailing_mtp.kernels.reference.peer_norm import Mailboxes
from bailing_mtp.kernels.triton import norm, peer_norm
from bailing_mtp.parallel.collectives import PeerSum, peer_words


@dataclass(frozen=True)
class PeerSums:
    """All ranks of the group call with as many rows, in one order, on one stream each."""

    sums: PeerSum
    mail: Mailboxes
    _room: Tensor
    """This rank's mailbox, held for the others to write to."""

    @staticmethod
    def make(
        group: dist.ProcessGroup, rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> PeerSums:
        """For sums of up to `rows` rows. Collective. Raises UserError where the GPUs cannot reach one another."""
        n = Mailboxes.rows(group.size(), rows)
        n_words = Mailboxes.words(group.size(), n, hidden_size, dtype.itemsize)
        try:
            room, addresses = peer_words(group, n_words, device)
            sums = PeerSum(group, rows * hidden_size, dtype, device)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"rollout.tp_sum: 'peer' needs GPUs that reach one another's memory ({reason}); allowed here: library"
            ) from error
        mail = Mailboxes(
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.zeros(n, dtype=torch.int32, device=device),
            group.rank(),
        )
        return PeerSums(sums, mail, room)

    def __call__(self, x: Tensor) -> Tensor:
        """The sum; `x` may hold it too."""
        return self.sums(x)

    def add_rms_norm(self, x_RH: Tensor, part_RH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """As kernels.reference.peer_norm.add_rms_norm_of_parts of the ranks' parts."""
        if x_RH.shape[0] <= self.mail.number_R.shape[0]:
            return peer_norm.exchange_add_rms_norm(x_RH, part_RH, weight_H, eps, self.mail)
        return norm.add_rms_norm(x_RH, self.sums(part_RH), weight_H, eps)
