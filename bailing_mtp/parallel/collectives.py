"""Collectives of inference, by one name on every version of torch, and several small values in one of them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Newer versions warn of the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's `x` of one dimension or more, [ranks, ...]."""
    everyone = x.new_empty(group.size(), *x.shape)
    _all_gather(everyone.flatten(0, 1), x.contiguous(), group=group)
    return everyone


def sum_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the sum of every rank's `x`: of as many equal blocks of rows as there are ranks, its own."""
    mine = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    _reduce_scatter(mine, x.contiguous(), group=group)
    return mine


class OneShotSum:
    """Sums small tensors over GPUs of one node that read one another's memory: one launch, where each rank adds all
    ranks' values in one order. Equal on all ranks. Made by all ranks of the group together.

    torch's symmetric memory. More elements than there is room for are summed by the group's library.
    """

    def __init__(self, group: dist.ProcessGroup, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self._group = group
        self._room = symmetric.empty(elements, dtype=dtype, device=device)
        symmetric.rendezvous(self._room, group.group_name)

    def __call__(self, x: Tensor) -> Tensor:
        """The sum; `x` may hold it too."""
        x = x.contiguous()
        if x.numel() <= self._room.numel():
            return torch.ops.symm_mem.one_shot_all_reduce_copy(self._room, x, "sum", self._group.group_name)
        dist.all_reduce(x, group=self._group)
        return x


def gathered(parts: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Every rank's tensors, each [ranks, ...], bit for bit; one collective.

    Of 8 or 4 bytes an element, those of 8 first.
    """
    words = [x.reshape(-1).view(torch.int32) for x in parts]
    n_words = sum(map(len, words))
    if group is None or group.size() == 1 or not n_words:
        return [x.unsqueeze(0) for x in parts]
    # Elements of 8 bytes must be aligned in every rank's row.
    padding = [words[0].new_zeros(1)] * (n_words % 2)
    everyone = all_gather(torch.cat([*words, *padding]), group)
    shares = everyone[:, :n_words].split([len(part) for part in words], 1)
    return [share.view(x.dtype).unflatten(1, x.shape) for share, x in zip(shares, parts, strict=True)]
