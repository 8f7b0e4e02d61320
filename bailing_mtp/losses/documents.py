"""Sums of per-site values over the documents of a pack.

Shapes: T tokens of the pack, N documents, padding documents included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bailing_mtp.contracts.batch import PackedLayout


def document_sums(values_T: Tensor, valid_T: Tensor, layout: PackedLayout) -> Tensor:
    """fp64 [N]: sum of a document's values where `valid_T`; zero for a document without such sites.

    What stands elsewhere in `values_T` means nothing and may be NaN. The order of the sum is fixed.
    """
    kept_T = torch.where(valid_T, values_T, 0.0).double()
    running = torch.nn.functional.pad(kept_T.cumsum(0), (1, 0))
    return running[layout.cu_seqlens[1:]] - running[layout.cu_seqlens[:-1]]
