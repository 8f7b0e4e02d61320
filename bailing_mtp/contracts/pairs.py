"""A microbatch of preference pairs.

Shapes: T tokens of the pack, P pairs. Documents 2i and 2i+1 of the pack are pair i, chosen before rejected.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bailing_mtp.contracts.batch import TokenBatch, to_device


@dataclass(frozen=True)
class PairBatch(TokenBatch):
    """Rows of pairs, then padding. Both rows have trained tokens; only chosen ones are MTP targets."""

    reference_P2: Tensor = field(default_factory=lambda: torch.zeros(0, 2, dtype=torch.float64))
    """fp64, log-probability of the trained tokens of each row under the reference model, summed."""

    @staticmethod
    def of(batch: TokenBatch, reference_P2: Tensor) -> PairBatch:
        """`batch` holds the 2 P rows first; its MTP targets become those of the chosen rows."""
        n_rows = sum(not is_padding for is_padding in batch.layout.is_padding)
        assert n_rows == 2 * len(reference_P2), f"{n_rows} rows for {len(reference_P2)} pairs"
        lengths = torch.tensor(batch.layout.lengths)
        is_chosen_N = (torch.arange(len(lengths)) % 2 == 0) & (torch.arange(len(lengths)) < n_rows)
        mtp_mask_T = batch.loss_mask_T & torch.repeat_interleave(is_chosen_N, lengths)
        return PairBatch(
            input_ids_T=batch.input_ids_T,
            loss_mask_T=batch.loss_mask_T,
            layout=batch.layout,
            document_ids=batch.document_ids,
            mtp_mask_T=mtp_mask_T,
            reference_P2=reference_P2,
        )

    @property
    def n_pairs(self) -> int:
        return len(self.reference_P2)

    def to(self, device: torch.device) -> PairBatch:
        return replace(super().to(device), reference_P2=to_device(self.reference_P2, device)).remembering(self)
