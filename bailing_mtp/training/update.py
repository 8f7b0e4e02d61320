"""From accumulated gradients to new weights: complete, check, clip, step.

The pieces of megatron-core's ChainedOptimizer.step, in its order, with one check between norms and update: a
gradient that is not finite must stop the run while the weights are still good.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer.optimizer import SEPARATE_GRAD_NORM_GROUPS, ChainedOptimizer, MegatronOptimizer

from bailing_mtp.errors import UserError
from bailing_mtp.training.state import TrainState

TRUNK = "trunk"


class TrainingDiverged(UserError):
    """A loss or gradient that is not finite; the weights are those of the last finished step."""


def finish_gradients(state: TrainState, reduce_whole: bool = False) -> None:
    """Sum gradients over data-parallel ranks, and over tensor-parallel ranks where a parameter is replicated;
    move the routers' balance bias. `reduce_whole` leaves whole sums on every rank instead of shards."""
    with state.context.megatron_scope():
        finalize_model_grads(
            state.chunks, None, pg_collection=state.context.groups, force_all_reduce=reduce_whole
        )


@contextlib.contextmanager
def router_bias_kept(state: TrainState) -> Iterator[None]:
    """Put the routers' balance bias back when the block raises TrainingDiverged: `finish_gradients` moves it
    before the gradients' norms are known."""
    biases = [
        buffer
        for chunk in state.chunks
        for name, buffer in chunk.module.named_buffers()
        if name.endswith("expert_bias")
    ]
    before = [bias.clone() for bias in biases]
    try:
        yield
    except TrainingDiverged:
        for bias, kept in zip(biases, before, strict=True):
            bias.copy_(kept)
        raise


@torch.no_grad()
def clip_and_step(state: TrainState, clip_norm: float | None) -> dict[str, float]:
    """Clip the trunk's and the MTP layer's gradients each by its own global norm, then step the optimizer.

    Returns the norms before clipping, by group. Raises TrainingDiverged, before any weight changes, when a norm
    is not finite.
    """
    optimizer = state.optimizer
    at_hand = contextlib.nullcontext() if state.offload is None else state.offload.on_device()
    with state.context.megatron_scope(), at_hand:
        optimizer.prepare_grads()
        norms = _norms(optimizer)
        _require_finite(state, norms)
        if clip_norm is not None:
            for part in optimizer.chained_optimizers:
                _clip(part, clip_norm, norms)
        optimizer.step_with_ready_grads()
    return norms


def _norms(optimizer: ChainedOptimizer) -> dict[str, float]:
    """By group, of the gradients of all ranks. As megatron-core's, which reads every parameter's norm on the host."""
    groups = [None, *(group for group in SEPARATE_GRAD_NORM_GROUPS if optimizer.has_grad_norm_group(group))]
    total: torch.Tensor | float = 0.0
    for part in optimizer.chained_optimizers:
        by_group = [part.get_grads_for_grad_norm(group) for group in groups]
        squares = torch.stack([_sum_of_squares(grads) for grads in by_group])
        dist.all_reduce(squares, group=part.get_grad_stats_parallel_group())
        total = total + squares
    return {group or TRUNK: math.sqrt(square) for group, square in zip(groups, total.tolist(), strict=True)}


def _sum_of_squares(grads: list[torch.Tensor]) -> torch.Tensor:
    if not grads:
        return torch.zeros((), dtype=torch.float64, device="cuda")
    return torch.stack(torch._foreach_norm(grads)).double().square().sum()


def _clip(optimizer: MegatronOptimizer, clip_norm: float, norms: dict[str, float]) -> None:
    by_group: dict[str, list[torch.Tensor]] = {}
    for parameter in optimizer.get_parameters():
        group = getattr(parameter, "grad_norm_group", None) or TRUNK
        if parameter.grad is not None:
            by_group.setdefault(group, []).append(parameter.grad)
    for group, grads in by_group.items():
        factor = clip_norm / (norms[group] + 1e-6)
        if factor < 1.0:
            # In place: megatron-core without apex makes a scaled copy of each.
            torch._foreach_mul_(grads, factor)


def _require_finite(state: TrainState, norms: dict[str, float]) -> None:
    """The same message on every rank; the norms are, so all ranks raise or none."""
    bad = [group for group, norm in norms.items() if not math.isfinite(norm)]
    if not bad:
        return
    names = [
        name
        for group, chunk in zip((TRUNK, "mtp"), state.chunks, strict=False)
        if group in bad
        for name, parameter in chunk.module.named_parameters()
        if not torch.isfinite(parameter.main_grad).all()
    ]
    everyone: list[list[str]] = [[]] * state.context.world_size
    dist.all_gather_object(everyone, names)
    shown = ", ".join(list(dict.fromkeys(name for names in everyone for name in names))[:3])
    raise TrainingDiverged(f"gradient of the parameter group {' and '.join(bad)} is not finite ({shown})")
