"""One pass of the output head over several streams of hidden states, a chunk of rows at a time.

The trunk's and the MTP depths' logits that predict the same tokens are needed together (soft targets, acceptance),
and none of them may be held whole. The driver computes a chunk's logits of every stream, hands them to `chunk_fn`,
and keeps only what that returns; backward computes them again.

Shapes: T tokens, n rows of a stream that meet the head, t of a chunk, v this rank's rows of the vocabulary, H hidden
size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bailing_mtp.contracts.sites import Chunk, HeadRows
from bailing_mtp.parallel import vocab

ChunkFn = Callable[..., tuple[Tensor, ...]]

LOGITS_PER_CHUNK = 2**26
"""Elements of one stream's logits held at a time on a rank: 256 MiB in fp32."""


def chunk_tokens_for(vocab_rows: int) -> int:
    """Tokens of a chunk for a rank with `vocab_rows` rows; it depends on nothing else, so that a loss is bit-equal
    whatever else is computed beside it."""
    return max(16, LOGITS_PER_CHUNK // vocab_rows)


@dataclass(frozen=True)
class Pass:
    """What stays the same over the chunks of one pass.

    chunk_fn(logits, partners, targets): each has one entry per stream: logits [t, v], places [t] of a depth's rows
    among the chunk's rows of the trunk (None for the trunk), target ids [t]. It returns fp32 [t] tensors. It is
    called without gradients in the forward pass and again with them in the backward pass, where only the outputs
    that have a gradient matter.
    trains_weight[i]: whether stream i's gradient reaches the head weight.
    """

    chunk_fn: ChunkFn
    chunk_tokens: int
    trains_weight: tuple[bool, ...]
    rows: HeadRows


def head_pass(
    streams: tuple[Tensor, ...], weight_vH: Tensor, plan: Pass, targets: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Outputs of `plan.chunk_fn`, each joined over the chunks.

    streams: [T, H] each, or what of it plan.rows speaks of. The gradient of a stream is this rank's part of a sum
    over the tensor-parallel group; that of the weight is complete. targets: ids, one [n] per stream.
    """
    assert len(streams) == len(plan.trains_weight), "one trains_weight flag per stream"
    return _HeadPass.apply(plan, targets, weight_vH, *streams)


class _HeadPass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, plan: Pass, targets: tuple[Tensor, ...], weight_vH: Tensor, *streams: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.plan = plan
        ctx.save_for_backward(weight_vH, *targets, *streams)
        ctx.set_materialize_grads(False)
        operand_vH = vocab.mm_operand(weight_vH, streams[0])
        pieces = []
        for chunk in _chunks(plan):
            logits = [vocab.head_logits(x_tH, operand_vH) for x_tH in _cut(streams, plan, chunk)]
            pieces.append(plan.chunk_fn(logits, _partners(plan, chunk), _targets(targets, chunk)))
            logits = None  # freed before the next chunk's are made
        return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: Pass = ctx.plan
        n = len(plan.trains_weight)
        weight_vH, *rest = ctx.saved_tensors
        targets, streams = tuple(rest[:n]), tuple(rest[n:])
        wants_stream = ctx.needs_input_grad[3:]
        wants_weight = [ctx.needs_input_grad[2] and trains for trains in plan.trains_weight]
        operand_vH = vocab.mm_operand(weight_vH, streams[0])
        stream_grads = [
            torch.zeros_like(x) if wanted else None for x, wanted in zip(streams, wants_stream, strict=True)
        ]
        weight_grad_vH = torch.zeros_like(weight_vH, dtype=vocab.wide(weight_vH)) if any(wants_weight) else None
        begins = [0] * len(output_grads)
        for chunk in _chunks(plan):
            hidden = _cut(streams, plan, chunk)
            logits = [vocab.head_logits(x_tH, operand_vH) for x_tH in hidden]
            wanted = [
                index
                for index, (lo, hi) in enumerate(_spans(chunk))
                if hi > lo and (wants_stream[index] or wants_weight[index]) and (index or chunk.trains_trunk)
            ]
            found = _logits_grads(plan, chunk, logits, _targets(targets, chunk), wanted, output_grads, begins)
            for index, grad_tv in zip(wanted, found, strict=True):
                grad_tv = grad_tv.to(operand_vH.dtype)
                if wants_stream[index]:
                    grad_tH = (grad_tv @ operand_vH).to(streams[index].dtype)
                    stream_grads[index].index_copy_(0, _places(plan, chunk, index), grad_tH)
                if wants_weight[index]:
                    vocab.accumulate_mm(weight_grad_vH, grad_tv.t(), hidden[index].to(operand_vH.dtype))
            logits = found = grad_tv = None  # freed before the next chunk's are made
        weight_grad = None if weight_grad_vH is None else weight_grad_vH.to(weight_vH.dtype)
        return None, None, weight_grad, *stream_grads


def _chunks(plan: Pass) -> list[Chunk]:
    """Without any row one empty chunk, so that the outputs are part of the graph."""
    return plan.rows.chunks(plan.chunk_tokens) or [Chunk(0, 0, ((0, 0),) * len(plan.rows.depths), False)]


def _spans(chunk: Chunk) -> tuple[tuple[int, int], ...]:
    """First row and one past the last of every stream."""
    return ((chunk.begin, chunk.end), *chunk.depths)


def _places(plan: Pass, chunk: Chunk, index: int) -> Tensor:
    """Where a chunk's rows lie in their stream."""
    lo, hi = _spans(chunk)[index]
    return (plan.rows.sites_n if index == 0 else plan.rows.depths[index - 1].rows_n)[lo:hi]


def _cut(streams: tuple[Tensor, ...], plan: Pass, chunk: Chunk) -> list[Tensor]:
    return [stream.index_select(0, _places(plan, chunk, index)) for index, stream in enumerate(streams)]


def _partners(plan: Pass, chunk: Chunk) -> list[Tensor | None]:
    pairs = zip(plan.rows.depths, chunk.depths, strict=True)
    return [None, *(depth.partners_n[lo:hi] - chunk.begin for depth, (lo, hi) in pairs)]


def _targets(targets: tuple[Tensor, ...], chunk: Chunk) -> list[Tensor]:
    return [target_n[lo:hi] for target_n, (lo, hi) in zip(targets, _spans(chunk), strict=True)]


def _logits_grads(
    plan: Pass,
    chunk: Chunk,
    logits: list[Tensor],
    targets: list[Tensor],
    wanted: list[int],
    output_grads: Sequence[Tensor | None],
    begins: list[int],
) -> list[Tensor]:
    """Gradients of the used outputs for the wanted streams' logits; zeros where none reaches.

    begins: where this chunk's part of every output begins; moved to the next chunk's.
    """
    with torch.enable_grad():
        leaves = [x.requires_grad_() if index in wanted else x for index, x in enumerate(logits)]
        outputs = plan.chunk_fn(leaves, _partners(plan, chunk), targets)
    pairs = []
    for index, (out, grad) in enumerate(zip(outputs, output_grads, strict=True)):
        if grad is not None and out.requires_grad:
            pairs.append((out, grad[begins[index] : begins[index] + out.numel()]))
        begins[index] += out.numel()
    leaves = [leaves[index] for index in wanted]
    if not pairs:
        return [torch.zeros_like(x) for x in leaves]
    found = torch.autograd.grad([out for out, _ in pairs], leaves, [grad for _, grad in pairs], allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, found, strict=True)]
