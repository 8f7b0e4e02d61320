"""The head's losses and metrics with one pass over the logits of a chunk for each thing that is read off them.

Backward knows the log-sum-exps, so it computes a chunk's logits again and writes their gradient at once, in the
dtype of its products. A chunk of the trunk's rows meets the rows of every depth whose counterparts they are, so no
row of the trunk is computed twice.

Shapes: T tokens of the pack, n rows of a stream that meet the head, t of a chunk, v this rank's rows of the
vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from bailing_mtp.contracts.sites import Chunk, HeadRows
from bailing_mtp.parallel import vocab

LOGITS_PER_CHUNK = 2**27
"""Elements of one stream's logits held at a time on a rank: 512 MiB in fp32."""
TOKENS_MULTIPLE = 128
"""Rows of a tile of the matrix products."""
PER_DEPTH = 4


def fused_chunk_tokens(vocab_rows: int) -> int:
    """Tokens of a chunk for a rank with `vocab_rows` rows of the vocabulary."""
    return max(TOKENS_MULTIPLE, LOGITS_PER_CHUNK // vocab_rows // TOKENS_MULTIPLE * TOKENS_MULTIPLE)


@dataclass(frozen=True)
class FusedPlan:
    """Temperatures and targets as in heads.HeadOptions. kernels: kernels.reference.head or kernels.triton.head."""

    kernels: ModuleType
    group: ProcessGroup | None
    chunk_tokens: int
    objective: Literal["hard", "soft"]
    trains_weight: tuple[bool, ...]
    temperature: float
    policy_temperature: float


def fused_outputs(
    plan: FusedPlan, rows: HeadRows, targets: tuple[Tensor, ...], weight_vH: Tensor, streams: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """fp32 [n] each: log-probability, hit and entropy of the trunk, then loss, acceptance, agreement and ratio of
    every depth; meanings and gradients as heads.HeadOutputs. targets: ids, one [n] per stream."""
    return _Fused.apply(plan, rows, targets, weight_vH, *streams)


class _Joined(NamedTuple):
    """RowStats of the whole vocabulary."""

    lse_t: Tensor
    entropy_t: Tensor
    best_t: Tensor
    target_t: Tensor


class _Fused(Function):
    @staticmethod
    def forward(
        ctx: Any, plan: FusedPlan, rows: HeadRows, targets: tuple[Tensor, ...], weight_vH: Tensor, *streams: Tensor
    ) -> tuple[Tensor, ...]:
        make = {"dtype": torch.float32, "device": streams[0].device}
        sizes = [target_n.numel() for target_n in targets]
        outputs = [torch.empty(sizes[0], **make) for _ in range(3)]
        outputs += [torch.empty(size, **make) for size in sizes[1:] for _ in range(PER_DEPTH)]
        # Of every stream, and last the trunk's at temperature 1, which the soft target's gradient reads.
        lses = [torch.empty(size, **make) for size in (*sizes, sizes[0])]
        operand_vH = vocab.mm_operand(weight_vH, streams[0])
        for chunk in rows.chunks(plan.chunk_tokens):
            _forward_chunk(plan, rows, chunk, streams, targets, operand_vH, outputs, lses)
        ctx.plan, ctx.rows, ctx.n_streams = plan, rows, len(streams)
        ctx.save_for_backward(weight_vH, *lses, *targets, *streams)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for i, x in enumerate(outputs) if i and (i < 3 or (i - 3) % PER_DEPTH)))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan, rows, n = ctx.plan, ctx.rows, ctx.n_streams
        weight_vH, *rest = ctx.saved_tensors
        lses, targets, streams = rest[: n + 1], rest[n + 1 : 2 * n + 1], rest[2 * n + 1 :]
        upstream = [output_grads[0], *(output_grads[3 + PER_DEPTH * depth] for depth in range(n - 1))]
        wants_weight = [ctx.needs_input_grad[3] and trains for trains in plan.trains_weight]
        wants_stream = ctx.needs_input_grad[4:]
        operand_vH = vocab.mm_operand(weight_vH, streams[0])
        weight_grad_vH = torch.zeros_like(weight_vH, dtype=vocab.wide(weight_vH)) if any(wants_weight) else None
        grads = [torch.zeros_like(x) if wanted else None for x, wanted in zip(streams, wants_stream, strict=True)]
        for chunk in rows.chunks(plan.chunk_tokens):
            p_rv = None
            for depth, (lo, hi) in enumerate(((chunk.begin, chunk.end), *chunk.depths)):
                needed = (wants_stream[depth] or wants_weight[depth]) and upstream[depth] is not None
                if hi <= lo or not needed or (depth == 0 and not chunk.trains_trunk):
                    continue
                soft = plan.objective == "soft"
                if soft and p_rv is None:
                    p_rv = vocab.head_logits(_rows(streams, rows, 0, chunk.begin, chunk.end), operand_vH)
                hidden_tH = _rows(streams, rows, depth, lo, hi)
                logits_tv = p_rv if depth == 0 and soft else vocab.head_logits(hidden_tH, operand_vH)
                grad_t, lse_t = upstream[depth][lo:hi], lses[depth][lo:hi]
                if soft and depth > 0:
                    partners_t = rows.depths[depth - 1].partners_n[lo:hi] - chunk.begin
                    pair = (logits_tv, lse_t, p_rv, lses[-1][chunk.begin : chunk.end], partners_t)
                    grad_tv = plan.kernels.soft_grad(*pair, grad_t, operand_vH.dtype)
                else:
                    target_t = targets[depth][lo:hi] - _first_row(plan, logits_tv)
                    scale, sign = (1.0 / plan.policy_temperature, 1.0) if depth == 0 else (1.0, -1.0)
                    grad_tv = plan.kernels.target_grad(
                        logits_tv, lse_t, target_t, sign * grad_t, scale, operand_vH.dtype
                    )
                logits_tv = pair = None  # freed before the products
                if wants_stream[depth]:
                    grad_tH = (grad_tv @ operand_vH).to(streams[depth].dtype)
                    grads[depth].index_copy_(0, _places(rows, depth, lo, hi), grad_tH)
                if wants_weight[depth]:
                    vocab.accumulate_mm(weight_grad_vH, grad_tv.t(), hidden_tH.to(operand_vH.dtype))
                grad_tv = None  # freed before the next stream's logits are made
        weight_grad = None if weight_grad_vH is None else weight_grad_vH.to(weight_vH.dtype)
        return None, None, None, weight_grad, *grads


def _places(rows: HeadRows, stream: int, lo: int, hi: int) -> Tensor:
    return (rows.sites_n if stream == 0 else rows.depths[stream - 1].rows_n)[lo:hi]


def _rows(streams: Sequence[Tensor], rows: HeadRows, stream: int, lo: int, hi: int) -> Tensor:
    return streams[stream].index_select(0, _places(rows, stream, lo, hi))


def _forward_chunk(
    plan: FusedPlan,
    rows: HeadRows,
    chunk: Chunk,
    streams: tuple[Tensor, ...],
    targets: tuple[Tensor, ...],
    operand_vH: Tensor,
    outputs: list[Tensor],
    lses: list[Tensor],
) -> None:
    """Fill the places of the chunk's rows."""
    begin, end, here = chunk.begin, chunk.end, slice(chunk.begin, chunk.end)
    p_rv, target_r = vocab.head_logits(_rows(streams, rows, 0, begin, end), operand_vH), targets[0][here]
    policy = _stats(plan, p_rv, target_r, plan.policy_temperature)
    outputs[0][here] = policy.target_t - policy.lse_t
    outputs[1][here] = (policy.best_t == target_r).float()
    outputs[2][here] = policy.entropy_t
    lses[0][here] = policy.lse_t
    if not rows.depths:
        return
    same = plan.temperature == plan.policy_temperature
    trunk = policy if same else _stats(plan, p_rv, target_r, plan.temperature)
    plain = trunk if plan.temperature == 1.0 else None
    if plan.objective == "soft":
        plain = _stats(plan, p_rv, target_r, 1.0) if plain is None else plain
        lses[-1][here] = plain.lse_t
    # The trunk's target at site t+d is this depth's at site t.
    p_log_r = trunk.target_t - trunk.lse_t
    for depth, (lo, hi) in enumerate(chunk.depths, start=1):
        if hi <= lo:
            continue
        at, partners_t = slice(lo, hi), rows.depths[depth - 1].partners_n[lo:hi] - begin
        q_tv = vocab.head_logits(_rows(streams, rows, depth, lo, hi), operand_vH)
        draft = _stats(plan, q_tv, targets[depth][at], 1.0)
        tempered = draft if plan.temperature == 1.0 else _stats(plan, q_tv, targets[depth][at], plan.temperature)
        mass_t, cross_t = _pair(plan, p_rv, trunk.lse_t, partners_t, q_tv, tempered.lse_t, plan.temperature)
        if plan.objective == "soft" and plan.temperature != 1.0:
            cross_t = _pair(plan, p_rv, plain.lse_t, partners_t, q_tv, draft.lse_t, 1.0)[1]
        lses[depth][at] = draft.lse_t
        found = (
            -cross_t if plan.objective == "soft" else draft.lse_t - draft.target_t,
            mass_t,
            (draft.best_t == policy.best_t[partners_t]).float(),
            (tempered.target_t - tempered.lse_t - p_log_r[partners_t]).clamp(max=0.0).exp(),
        )
        first = 3 + PER_DEPTH * (depth - 1)
        for output, values_t in zip(outputs[first : first + PER_DEPTH], found, strict=True):
            output[at] = values_t


def _stats(plan: FusedPlan, logits_tv: Tensor, target_t: Tensor, temperature: float) -> _Joined:
    first = _first_row(plan, logits_tv)
    max_t, sum_t, weighted_t, best_t, found_t = plan.kernels.row_stats(logits_tv, target_t - first, 1.0 / temperature)
    if plan.group is not None and plan.group.size() > 1 and max_t.numel():
        own_max_t, max_t = max_t, max_t.clone()
        dist.all_reduce(max_t, dist.ReduceOp.MAX, plan.group)
        fall_t = own_max_t - max_t
        weighted_t = fall_t.exp() * (weighted_t + sum_t * fall_t)
        sums = torch.stack([sum_t * fall_t.exp(), weighted_t, found_t])
        dist.all_reduce(sums, group=plan.group)
        sum_t, weighted_t, found_t = sums
        nowhere = logits_tv.shape[-1] * plan.group.size()
        best_t = torch.where(own_max_t == max_t, best_t + first, nowhere)
        dist.all_reduce(best_t, dist.ReduceOp.MIN, plan.group)
    log_sum_t = sum_t.log()
    return _Joined(max_t + log_sum_t, log_sum_t - weighted_t / sum_t, best_t, found_t)


def _pair(
    plan: FusedPlan,
    p_rv: Tensor,
    p_lse_r: Tensor,
    partners_t: Tensor,
    q_tv: Tensor,
    q_lse_t: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    found = torch.stack(plan.kernels.pair_stats(p_rv, p_lse_r, partners_t, q_tv, q_lse_t, 1.0 / temperature))
    if plan.group is not None and plan.group.size() > 1 and found.numel():
        dist.all_reduce(found, group=plan.group)
    return found[0], found[1]


def _first_row(plan: FusedPlan, logits_tv: Tensor) -> int:
    return 0 if plan.group is None else plan.group.rank() * logits_tv.shape[-1]
