"""What a pass of a decode step begins with, in plain torch: embeddings, and where its rows stand.

Shape legend: R tokens, v vocabulary rows of this rank, H hidden size, N slots, n rows of the step, M blocks
of a table.
"""

import torch
from torch import Tensor

from bailing_mtp.kernels.reference.norm import rms_norm


def embed(ids_R: Tensor, embedding_vH: Tensor, first_id: int) -> Tensor:
    """Rows of the ids first_id, first_id + 1, ...: [R, H]; any other id gives zeros."""
    v, row_R = embedding_vH.shape[0], ids_R.long() - first_id
    here_R = (row_R >= 0) & (row_R < v)
    return torch.where(here_R.unsqueeze(1), embedding_vH[row_R.clamp(0, v - 1)], 0)


def norm_pair(left_RH: Tensor, left_norm_H: Tensor, right_RH: Tensor, right_norm_H: Tensor, eps: float) -> Tensor:
    """RMSNorms of two tensors side by side, [R, 2 * H]."""
    return torch.cat((rms_norm(left_RH, left_norm_H, eps), rms_norm(right_RH, right_norm_H, eps)), dim=-1)


def step_rows(
    position_N: Tensor, block_table_NM: Tensor, slots_n: Tensor, offset: int
) -> tuple[Tensor, Tensor]:
    """Of each row's slot: position + offset, int64 [n] and never negative, and the block table [n, M]."""
    return (position_N[slots_n].long() + offset).clamp(min=0), block_table_NM[slots_n]
