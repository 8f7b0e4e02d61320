"""One pass of the output head over several streams of hidden states, a chunk of tokens at a time.

The trunk's and the MTP depths' logits of the same tokens are needed together (soft targets, acceptance), and
none of them may be held whole. The driver computes a chunk's logits of every stream, hands them to `chunk_fn`,
and keeps only what that returns; backward computes them again.

Shapes: T tokens, t of a chunk, D halo rows, V whole vocabulary, v this rank's rows of it, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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

    chunk_fn(logits, ahead_logits, *per_token): `logits` has one [t, v] tensor per stream, `ahead_logits` is
    [t + D, v] of stream 0 without gradient (rows past the pack repeat its last one), or None when halo is 0.
    It returns fp32 [t] tensors. It is called without gradients in the forward pass and again with them in the
    backward pass, where only the outputs that have a gradient matter.
    trains_weight[i]: whether stream i's gradient reaches the head weight.
    """

    chunk_fn: ChunkFn
    chunk_tokens: int
    halo: int
    trains_weight: tuple[bool, ...]


def head_pass(
    streams: tuple[Tensor, ...], weight_vH: Tensor, plan: Pass, per_token: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Outputs of `plan.chunk_fn` joined to [T].

    streams: [T, H] each. The gradient of a stream is this rank's part of a sum over the tensor-parallel group;
    that of the weight is complete. per_token: constants [T, ...] cut along with the tokens.
    """
    assert len(streams) == len(plan.trains_weight), "one trains_weight flag per stream"
    outputs = _HeadPass.apply(plan, per_token, weight_vH, *streams)
    return outputs


class _HeadPass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, plan: Pass, per_token: tuple[Tensor, ...], weight_vH: Tensor, *streams: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.plan, ctx.n_per_token = plan, len(per_token)
        ctx.save_for_backward(weight_vH, *per_token, *streams)
        ctx.set_materialize_grads(False)
        operand_vH = vocab.mm_operand(weight_vH, streams[0])
        pieces = []
        for begin in _begins(streams, plan):
            logits, ahead = _chunk_logits(streams, begin, plan, operand_vH)
            pieces.append(plan.chunk_fn(logits, ahead, *_cut(per_token, begin, plan)))
            logits = ahead = None  # freed before the next chunk's are made
        return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: Pass = ctx.plan
        weight_vH, *rest = ctx.saved_tensors
        per_token, streams = tuple(rest[: ctx.n_per_token]), tuple(rest[ctx.n_per_token :])
        wants_stream = ctx.needs_input_grad[3:]
        wants_weight = [ctx.needs_input_grad[2] and trains for trains in plan.trains_weight]
        operand_vH = vocab.mm_operand(weight_vH, streams[0])
        stream_grads = [
            torch.zeros_like(x) if wanted else None for x, wanted in zip(streams, wants_stream, strict=True)
        ]
        weight_grad_vH = torch.zeros_like(weight_vH, dtype=vocab.wide(weight_vH)) if any(wants_weight) else None
        wanted = [index for index in range(len(streams)) if wants_stream[index] or wants_weight[index]]
        for begin in _begins(streams, plan):
            logits, ahead = _chunk_logits(streams, begin, plan, operand_vH)
            rows = slice(begin, begin + plan.chunk_tokens)
            grads = [None if grad is None else grad[rows] for grad in output_grads]
            found = _logits_grads(plan, logits, ahead, _cut(per_token, begin, plan), wanted, grads)
            for index, grad_tv in zip(wanted, found, strict=True):
                grad_tv = grad_tv.to(operand_vH.dtype)
                if wants_stream[index]:
                    stream_grads[index][rows] = (grad_tv @ operand_vH).to(streams[index].dtype)
                if wants_weight[index]:
                    vocab.accumulate_mm(weight_grad_vH, grad_tv.t(), streams[index][rows].to(operand_vH.dtype))
            logits = ahead = found = grad_tv = None  # freed before the next chunk's are made
        weight_grad = None if weight_grad_vH is None else weight_grad_vH.to(weight_vH.dtype)
        return None, None, weight_grad, *stream_grads


def _begins(streams: tuple[Tensor, ...], plan: Pass) -> range:
    """First token of every chunk; an empty pack is one empty chunk, so that its outputs are part of the graph."""
    return range(0, max(1, streams[0].shape[0]), plan.chunk_tokens)


def _chunk_logits(
    streams: tuple[Tensor, ...], begin: int, plan: Pass, operand_vH: Tensor
) -> tuple[list[Tensor], Tensor | None]:
    """Every stream's logits [t, v] of one chunk, and stream 0's with the halo [t + D, v].

    The trunk's are held once: its [t, v] is a part of its [t + D, v].
    """
    rows = slice(begin, begin + plan.chunk_tokens)
    trunk_tv, ahead = vocab.head_logits(streams[0][rows], operand_vH), None
    if plan.halo > 0:
        # The halo is a product of its own: one product of all rows may round the chunk's own rows differently,
        # and the trunk's loss must not feel the MTP layer.
        trunk_TH = streams[0].detach()
        end = begin + trunk_tv.shape[0]
        n_halo = plan.halo if end else 0  # an empty pack has no row to repeat
        index = torch.arange(end, end + n_halo, device=trunk_TH.device).clamp(max=max(0, trunk_TH.shape[0] - 1))
        ahead = torch.cat((trunk_tv, vocab.head_logits(trunk_TH[index], operand_vH)))
        trunk_tv = ahead[: trunk_tv.shape[0]].detach()
    return [trunk_tv, *(vocab.head_logits(stream_TH[rows], operand_vH) for stream_TH in streams[1:])], ahead


def _cut(per_token: tuple[Tensor, ...], begin: int, plan: Pass) -> list[Tensor]:
    return [values[begin : begin + plan.chunk_tokens] for values in per_token]


def _logits_grads(
    plan: Pass,
    logits: list[Tensor],
    ahead_logits: Tensor | None,
    per_token: list[Tensor],
    wanted: list[int],
    grads: list[Tensor | None],
) -> list[Tensor]:
    """Gradients of the used outputs for the wanted streams' logits; zeros where none reaches."""
    with torch.enable_grad():
        leaves = [x.requires_grad_() if index in wanted else x for index, x in enumerate(logits)]
        outputs = plan.chunk_fn(leaves, ahead_logits, *per_token)
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None and out.requires_grad]
    targets = [leaves[index] for index in wanted]
    if not pairs:
        return [torch.zeros_like(x) for x in targets]
    found = torch.autograd.grad([out for out, _ in pairs], targets, [grad for _, grad in pairs], allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(targets, found, strict=True)]
