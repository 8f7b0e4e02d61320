"""Where this process stands among the others: ranks, sizes and process groups, as one frozen value.

Groups are passed, never fetched: everything that communicates takes a ParallelContext (or one of its
groups). Tensor parallel (tp) splits heads, widths and the vocabulary; expert parallel (ep) splits whole
experts over consecutive ranks; data parallel (dp) is the rest, world / tp. Expert tensor parallel is 1.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from bailing_mtp.parallel import cpu_backend
from bailing_mtp.parallel.fused import choose_fused


@dataclass(frozen=True)
class ParallelContext:
    """This rank's place, its device, and the groups it talks in."""

    rank: int
    world_size: int
    device: torch.device
    tp: int
    tp_rank: int
    ep: int
    ep_rank: int
    dp: int
    dp_rank: int
    groups: ProcessGroupCollection
    """megatron-core's collection: `groups.tp`, `groups.ep`, `groups.dp`, ..."""

    @property
    def is_writer(self) -> bool:
        """True on the one rank that writes logs and files."""
        return self.rank == 0

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return self.groups.tp

    @property
    def ep_group(self) -> dist.ProcessGroup:
        return self.groups.ep

    @property
    def dp_group(self) -> dist.ProcessGroup:
        return self.groups.dp

    @functools.cached_property
    def for_graphs(self) -> ParallelContext:
        """This place with tp and ep groups of its own, and no others, for the collectives inside CUDA graphs; itself
        where there are none. Collective over all ranks when first read.

        With NCCL_GRAPH_MIXING_SUPPORT=0 no eager collective may run on a communicator while a graph that uses it does,
        whatever streams they are on. Groups that no eager collective uses can be launched without NCCL's guard of it.
        """
        if self.device.type == "cpu" or self.tp == self.ep == 1:
            return self
        groups = ProcessGroupCollection(tp=_same_ranks(self.tp_group), ep=_same_ranks(self.ep_group))
        return replace(self, groups=groups)

    def megatron_scope(self) -> contextlib.AbstractContextManager[None]:
        """Scope in which megatron-core's optimizer and DDP code may name the device "cuda"."""
        return contextlib.nullcontext() if self.device.type == "cuda" else cpu_backend.literal_cuda_is_cpu()

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def sum_over_dp(self, values: Sequence[float | int | Tensor]) -> list[float]:
        """Element-wise sum over data-parallel ranks, in float64, in one collective. A single replica's numbers of the
        host are not sent through the device, whose queued work the host would wait for."""
        if self.dp == 1 and not any(isinstance(value, Tensor) for value in values):
            return [float(value) for value in values]
        total = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in values])
        if self.dp > 1:
            dist.all_reduce(total, group=self.dp_group)
        return total.tolist()


def init_distributed(device_type: str, timeout_s: float) -> None:
    """Join the process group that torchrun describes, or make one of a single process.

    A collective that waits longer than `timeout_s` seconds ends the run with an error.
    """
    if dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_s)
    backend = "nccl" if device_type == "cuda" else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def build_context(
    tp: int, ep: int, seed: int, device_type: str, local_rank: int = 0, timeout_s: float = 1800.0
) -> ParallelContext:
    """Join the other processes, form the groups, and seed this rank.

    device_type: "cuda" or "cpu"; on "cpu" the CPU backend is installed. local_rank: this process's GPU. Sizes must
    already be checked (config.checks.check_layout): world size divisible by tp and by ep.
    """
    if device_type == "cpu":
        cpu_backend.install()
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    init_distributed(device_type, timeout_s)
    if parallel_state.model_parallel_is_initialized():
        raise RuntimeError("process groups exist already; call destroy_context first")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
        # Its groups would otherwise wait for half an hour whatever the world's do.
        distributed_timeout_minutes=timeout_s / 60,
    )
    choose_fused("none")
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return ParallelContext(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        tp=tp,
        tp_rank=dist.get_rank(groups.tp),
        ep=ep,
        ep_rank=dist.get_rank(groups.ep),
        dp=dist.get_world_size(groups.dp),
        dp_rank=dist.get_rank(groups.dp),
        groups=groups,
    )


def host_group(group: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup | None:
    """A group of the same ranks for small reductions of host values; None for a single rank. Collective over all
    ranks, whose groups are equally large.

    On a GPU it is one of its own, so that the host waits for no device.
    """
    if group is None or group.size() == 1:
        return None
    if device.type == "cpu":
        return group
    return _same_ranks(group, "gloo")


def _same_ranks(group: dist.ProcessGroup, backend: str | None = None) -> dist.ProcessGroup:
    """A new group of the ranks of `group`. Collective over all ranks. backend: None = that of the world."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dist.get_process_group_ranks(group))
    # Made by all ranks in one order: its name is then never one that an ended group has left in the store.
    made = {ranks: dist.new_group(list(ranks), backend=backend) for ranks in dict.fromkeys(map(tuple, everyone))}
    return made[tuple(everyone[dist.get_rank()])]


def destroy_context() -> None:
    """End all groups but that of the world (tests walk several layouts in one process). Collective.

    Each gloo group has threads of its own, which wake up a hundred times a second for as long as it exists.
    """
    parallel_state.destroy_model_parallel()
    if not dist.is_initialized():
        return
    dist.barrier()
    world = dist.group.WORLD
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not world]:
        dist.destroy_process_group(group)


def gather_texts(context: ParallelContext, text: str) -> list[str]:
    """Every rank's text, on every rank, in rank order."""
    texts: list[Any] = [None] * context.world_size
    dist.all_gather_object(texts, text)
    return texts
