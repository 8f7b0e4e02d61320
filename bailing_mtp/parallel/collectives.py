"""Collectives of inference, by one name on every version of torch, and several small values in one of them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

TWO_SHOT_ELEMENTS = 400_000
"""Elements from which on sums take two shots. On two H200s one shot takes 10.9 and 20.4 us at 256 and 768 rows of 1536
in bf16, two take 8.5 and 13.5 beside their copies into and out of the room, for which 3 to 4 us are reckoned."""

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


def peer_words(group: dist.ProcessGroup, n: int, device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """int64 zeros [n] that every rank of the group can write to, and the addresses of all ranks' as this one sees
    them. All ranks of the group together, on GPUs of one node."""
    from torch.distributed import _symmetric_memory as symmetric

    words = symmetric.empty(n, dtype=torch.int64, device=device)
    words.zero_()
    torch.cuda.synchronize(device)
    # Ranks meet here, so that none writes before the zeros are there.
    handle = symmetric.rendezvous(words, group.group_name)
    return words, tuple(address + handle.offset for address in handle.buffer_ptrs)


class PeerSum:
    """Sums tensors over GPUs of one node that read one another's memory. Equal on all ranks, which each add all values
    in one order. Made by all ranks of the group together.

    torch's symmetric memory, without multicast. In one launch every rank adds everything; from TWO_SHOT_ELEMENTS on
    each adds a part and hands it to the others. Sums may follow one another in the one room: on a stream of every
    rank, these launches end only when all ranks have read what they need of it. More elements than there is room for,
    and tensors that do not fill words of 16 bytes, are summed by the group's library.
    """

    def __init__(self, group: dist.ProcessGroup, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self._group = group
        self._room = symmetric.empty(elements, dtype=dtype, device=device)
        symmetric.rendezvous(self._room, group.group_name)

    def __call__(self, x: Tensor) -> Tensor:
        """The sum; `x` may hold it too."""
        x, n = x.contiguous(), x.numel()
        if n > self._room.numel() or any(count * x.element_size() % 16 for count in (n, x.storage_offset())):
            dist.all_reduce(x, group=self._group)
            return x
        # The sum takes the sizes of both from the room's.
        room, flat = self._room[:n], x.view(-1)
        ops, name = torch.ops.symm_mem, self._group.group_name
        if n < TWO_SHOT_ELEMENTS:
            return ops.one_shot_all_reduce_copy(room, flat, "sum", name).view_as(x)
        room.copy_(flat)
        return ops.two_shot_all_reduce_(room, "sum", name).clone().view_as(x)


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
