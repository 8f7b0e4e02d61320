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
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

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
        norms = {TRUNK: float(optimizer.get_grad_norm())}
        norms |= {group: float(norm) for group, norm in optimizer._compute_grad_norms_by_group().items()}
        _require_finite(state, norms)
        if clip_norm is not None:
            for part in optimizer.chained_optimizers:
                _clip(part, clip_norm, norms)
        optimizer.step_with_ready_grads()
    return norms


def _clip(optimizer: object, clip_norm: float, norms: dict[str, float]) -> None:
    by_group: dict[str, list[torch.nn.Parameter]] = {}
    for parameter in optimizer.get_parameters():
        group = getattr(parameter, "grad_norm_group", None) or TRUNK
        by_group.setdefault(group, []).append(parameter)
    for group, parameters in by_group.items():
        clip_grad_by_total_norm_fp32(parameters, max_norm=clip_norm, total_norm=norms[group])


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
