"""Joins the shards of one HF tensor at a time on the writer (global rank 0)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from bailing_mtp.weights.local_tensors import piece_view
from bailing_mtp.weights.names import ParamMap, ParamMaps, Piece, Shard

WRITER = 0


class Gatherer:
    """This rank's part in gathering to the writer.

    Only the tensor-parallel and the expert-parallel group that contain the writer communicate. All their
    ranks must walk the same table in the same order.
    """

    def __init__(
        self,
        shard: Shard,
        tp_group: dist.ProcessGroup | None,
        ep_group: dist.ProcessGroup | None,
        is_writer: bool,
    ) -> None:
        self._shard = shard
        self._tp_group = _writers(tp_group, shard.tp, shard.tp_rank)
        self._ep_group = _writers(ep_group, shard.ep, shard.ep_rank)
        self._is_writer = is_writer
        if is_writer:
            assert shard.tp_rank == 0 and shard.ep_rank == 0, f"the writer holds the first shard, not {shard}"
            assert not dist.is_initialized() or dist.get_rank() == WRITER

    def agree(self, ok: bool, device: torch.device) -> bool:
        """The writer's `ok` on every rank that takes part; True on the others."""
        verdict = torch.tensor([int(ok)], device=device)
        for group in (self._tp_group, self._ep_group):
            if group is not None:
                dist.broadcast(verdict, src=WRITER, group=group)
        return bool(verdict.item())

    def stream(
        self, whole_maps: ParamMaps, local_maps: ParamMaps, tensors: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Every HF tensor of a table in turn: its name and, on the writer, the tensor in its HF shape.

        `whole_maps` is the table of the undivided model, `local_maps` and `tensors` are this rank's.
        """
        for name, whole in whole_maps.items():
            join = self._join_experts if whole.split == "ep" else self._join_blocks
            yield from join(whole, local_maps[name], tensors[name])

    def _join_blocks(
        self, whole: ParamMap, local: ParamMap, tensor: Tensor
    ) -> Iterator[tuple[str, Tensor | None]]:
        for piece in local.pieces:
            if whole.split == "tp" and self._tp_group is not None:
                yield piece.hf_name, self._gather(piece, _held(tensor, piece))
            else:
                yield piece.hf_name, _held(tensor, piece) if self._is_writer else None

    def _gather(self, piece: Piece, block: Tensor) -> Tensor | None:
        blocks = [torch.empty_like(block) for _ in range(self._shard.tp)] if self._is_writer else None
        dist.gather(block, blocks, dst=WRITER, group=self._tp_group)
        return None if blocks is None else torch.cat(blocks, dim=piece.held.dim)

    def _join_experts(
        self, whole: ParamMap, local: ParamMap, tensor: Tensor
    ) -> Iterator[tuple[str, Tensor | None]]:
        n_local = len(local.pieces)
        for index, piece in enumerate(whole.pieces):
            owner, place = divmod(index, n_local)
            is_owner = owner == self._shard.ep_rank
            if is_owner:
                expert = _held(tensor, local.pieces[place])
            elif self._ep_group is not None:
                expert = torch.empty(piece.held_shape, dtype=tensor.dtype, device=tensor.device)
            if self._ep_group is not None and owner != 0:
                dist.broadcast(expert, src=dist.get_global_rank(self._ep_group, owner), group=self._ep_group)
            yield piece.hf_name, expert if self._is_writer else None


def _held(tensor: Tensor, piece: Piece) -> Tensor:
    return piece_view(tensor, piece).reshape(piece.held_shape).contiguous()


def _writers(group: dist.ProcessGroup | None, size: int, rank: int) -> dist.ProcessGroup | None:
    """The group if the writer is in it and it has more than one rank."""
    if group is None:
        assert size == 1, "a group is needed to gather from several ranks"
        return None
    assert dist.get_world_size(group) == size and dist.get_rank(group) == rank, (size, rank)
    return group if size > 1 and WRITER in dist.get_process_group_ranks(group) else None
