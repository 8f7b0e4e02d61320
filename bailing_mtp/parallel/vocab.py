"""Arithmetic over a vocabulary split among the tensor-parallel ranks, and the output head in token chunks.

Shape legend: T tokens, t tokens of a chunk, V whole vocabulary, v this rank's rows of it, H hidden size.
Rank r of n holds the vocabulary rows [r * v, (r + 1) * v); `group` is the tensor-parallel group, None for
one rank.

No rank ever holds a whole row of logits: every function reduces a few scalars per token, always with the same
number of collectives.  Results are equal on all ranks.  Gradients are those of the whole function with
respect to this rank's logits, for an upstream gradient that is equal on all ranks; the backward of these
functions needs no collective.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from bailing_mtp.parallel.collectives import gathered

Group = dist.ProcessGroup | None
ChunkFn = Callable[..., tuple[Tensor, ...]]


def log_sum_exp(logits_tv: Tensor, group: Group) -> Tensor:
    """log of the sum over the vocabulary of exp(logits); [t]."""
    return _LogSumExp.apply(logits_tv, group)


def log_prob(logits_tv: Tensor, target_t: Tensor, group: Group) -> Tensor:
    """Log-softmax at the target ids; [t].

    Targets are int64 ids below V.  Any other id (an ignored site) reads a logit of zero: mask its result.
    """
    return _LogProb.apply(logits_tv, target_t, group)


def entropy(logits_tv: Tensor, group: Group) -> Tensor:
    """Entropy of softmax(logits) in nats; [t].  Logits of -inf count as probability zero."""
    return _Entropy.apply(logits_tv, group)


def soft_cross_entropy(logits_tv: Tensor, target_logits_tv: Tensor, group: Group) -> Tensor:
    """Cross-entropy from softmax(target_logits), a constant, to softmax(logits), in nats; [t]."""
    return _SoftCrossEntropy.apply(logits_tv, target_logits_tv.detach(), group)


@torch.no_grad()
def sum_min(p_logits_tv: Tensor, q_logits_tv: Tensor, group: Group) -> Tensor:
    """sum over x of min(p(x), q(x)), the chance that a draft from q is accepted for p; [t], no gradient.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), corollary 3.6.
    """
    p_max_t, q_max_t = _row_max((p_logits_tv, q_logits_tv), group)
    p_tv, q_tv = _shifted_exp(p_logits_tv, p_max_t), _shifted_exp(q_logits_tv, q_max_t)
    p_sum_t, q_sum_t = _sum(torch.stack([p_tv.sum(-1), q_tv.sum(-1)]), group)
    torch.minimum(p_tv.div_(p_sum_t.unsqueeze(-1)), q_tv.div_(q_sum_t.unsqueeze(-1)), out=p_tv)
    return _sum(p_tv.sum(-1), group)


@torch.no_grad()
def argmax(logits_tv: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Id of the largest logit, ties to the lower id: int64 [t]; and bool [t], whether that logit is finite.

    Where it is not (the row holds NaN or +inf, or nothing but -inf) the id is 0: always a row that exists.
    """
    id_t, finite_t = best(*gathered(local_best(logits_tv, group), group))
    return torch.where(finite_t, id_t, 0), finite_t


def local_best(logits_tv: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Id of this rank's largest logit, int64 [t], and the logit."""
    column_t = logits_tv.argmax(-1)
    return column_t + _first_row(logits_tv.shape[-1], group), logits_tv.gather(-1, column_t.unsqueeze(-1)).squeeze(-1)


def best(id_gt: Tensor, value_gt: Tensor) -> tuple[Tensor, Tensor]:
    """Of the candidates of g ranks, each from its own rows, the id with the largest value, ties to the lower id: [t];
    and whether that value is finite."""
    # NaN travels as +inf, which is as bad.
    max_t, rank_t = value_gt.masked_fill(value_gt.isnan(), torch.inf).max(0)
    return id_gt.gather(0, rank_t.unsqueeze(0)).squeeze(0), max_t.isfinite()


@torch.no_grad()
def gumbel_argmax(logits_tv: Tensor, gumbel_tv: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """A sample of softmax(logits) (Gumbel-max trick) from this rank's slice of the noise; as `argmax`."""
    return argmax(logits_tv + gumbel_tv, group)


def head_logits(hidden_tH: Tensor, weight_vH: Tensor, out_tv: Tensor | None = None) -> Tensor:
    """Logits of this rank's vocabulary rows, [t, v] in fp32 (fp64 for fp64), never rounded to less.

    out_tv: where to write them. For use without autograd; `head_apply` is the differentiable way.
    """
    return _wide_mm(hidden_tH, weight_vH.t(), out_tv)


def head_apply(
    hidden_TH: Tensor,
    weight_vH: Tensor,
    chunk_fn: ChunkFn,
    per_token: tuple[Tensor, ...],
    chunk_tokens: int,
) -> tuple[Tensor, ...]:
    """Apply `chunk_fn(logits_tv, *per_token_chunk)` to the head's logits, `chunk_tokens` tokens at a time.

    `chunk_fn` returns fp32 tensors of shape [t] and must give the same values when called again: the backward
    recomputes a chunk's logits (and repeats its collectives), so that no more than one chunk of them is ever
    held.  `per_token` tensors, [T, ...], are constants.  Returns the outputs joined to [T].

    The gradient of `hidden_TH` is this rank's part of a sum over the tensor-parallel group, which the caller
    reduces (under sequence parallelism the backward of the gather does); that of `weight_vH` is complete.
    """
    assert chunk_tokens > 0, f"chunk_tokens is {chunk_tokens}"
    for index, tensor in enumerate(per_token):
        assert tensor.shape[0] == hidden_TH.shape[0], f"per-token tensor {index} has {tensor.shape[0]} rows"
        assert not tensor.requires_grad, f"per-token tensor {index} wants a gradient"
    return _HeadApply.apply(hidden_TH, weight_vH, chunk_fn, chunk_tokens, *per_token)


class _HeadApply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden_TH: Tensor, weight_vH: Tensor, chunk_fn: ChunkFn, chunk_tokens: int, *per_token: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden_TH, weight_vH, *per_token)
        ctx.chunk_fn, ctx.chunk_tokens = chunk_fn, chunk_tokens
        ctx.set_materialize_grads(False)
        operand_vH = mm_operand(weight_vH, hidden_TH)
        pieces = []
        # An empty pack is one empty chunk: its outputs are part of the graph like any other's.
        for hidden_tH, *chunk in _token_chunks((hidden_TH, *per_token), chunk_tokens):
            pieces.append(chunk_fn(head_logits(hidden_tH, operand_vH), *chunk))
        return tuple(torch.cat(pieces_of_output) for pieces_of_output in zip(*pieces, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_vH, *per_token = ctx.saved_tensors
        hidden_wanted, weight_wanted = ctx.needs_input_grad[:2]
        operand_vH = mm_operand(weight_vH, hidden_TH)
        used = [index for index, grad in enumerate(output_grads) if grad is not None]
        columns = (hidden_TH, *(output_grads[index] for index in used), *per_token)
        hidden_grads, weight_grad_vH = [], None
        if weight_wanted:
            weight_grad_vH = torch.zeros_like(weight_vH, dtype=wide(weight_vH))
        for hidden_tH, *chunk in _token_chunks(columns, ctx.chunk_tokens):
            grads, constants = chunk[: len(used)], chunk[len(used) :]
            logits_grad_tv = _logits_grad(
                head_logits(hidden_tH, operand_vH), ctx.chunk_fn, constants, used, grads
            )
            logits_grad_tv = logits_grad_tv.to(operand_vH.dtype)
            if hidden_wanted:
                hidden_grads.append((logits_grad_tv @ operand_vH).to(hidden_TH.dtype))
            if weight_wanted:
                accumulate_mm(weight_grad_vH, logits_grad_tv.t(), hidden_tH.to(operand_vH.dtype))
        return (
            torch.cat(hidden_grads) if hidden_wanted else None,
            weight_grad_vH.to(weight_vH.dtype) if weight_wanted else None,
            *(None for _ in range(2 + len(per_token))),
        )


def _logits_grad(
    logits_tv: Tensor, chunk_fn: ChunkFn, constants: list[Tensor], used: list[int], grads: list[Tensor]
) -> Tensor:
    """Gradient of the used outputs of `chunk_fn` for the logits; outputs without a graph add none."""
    with torch.enable_grad():
        logits_tv = logits_tv.requires_grad_()
        outputs = chunk_fn(logits_tv, *constants)
    graded = [outputs[index].requires_grad for index in used]
    outputs = [outputs[index] for index, wanted in zip(used, graded, strict=True) if wanted]
    grads = [grad for grad, wanted in zip(grads, graded, strict=True) if wanted]
    if not outputs:
        return torch.zeros_like(logits_tv)
    return torch.autograd.grad(outputs, logits_tv, grads)[0]


def _token_chunks(tensors: tuple[Tensor, ...], chunk_tokens: int) -> zip:
    return zip(*(tensor.split(chunk_tokens) for tensor in tensors), strict=True)


def mm_operand(weight_vH: Tensor, hidden_TH: Tensor) -> Tensor:
    """The weight in the dtype in which it is multiplied with hidden; converted once, not per chunk."""
    if weight_vH.is_cuda and weight_vH.dtype == hidden_TH.dtype:
        return weight_vH
    return weight_vH.to(torch.promote_types(wide(hidden_TH), weight_vH.dtype))


def _wide_mm(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    if left.is_cuda and left.dtype == right.dtype and left.dtype != wide(left):
        return torch.mm(left, right, out_dtype=wide(left), out=out)
    common = torch.promote_types(wide(left), right.dtype)
    return torch.matmul(left.to(common), right.to(common), out=out)


def accumulate_mm(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in total's wider dtype."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_tv: Tensor, group: Group) -> Tensor:
        (max_t,) = _row_max((logits_tv,), group)
        lse_t = max_t + _sum(_shifted_exp(logits_tv, max_t).sum(-1), group).log()
        ctx.save_for_backward(logits_tv, lse_t)
        return lse_t

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_t: Tensor) -> tuple[Tensor, None]:
        logits_tv, lse_t = ctx.saved_tensors
        return _shifted_exp(logits_tv, lse_t).mul_(grad_t.unsqueeze(-1)), None


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_tv: Tensor, target_t: Tensor, group: Group) -> Tensor:
        v = logits_tv.shape[-1]
        row_t = target_t - _first_row(v, group)
        here_t = (row_t >= 0) & (row_t < v)
        row_t = row_t.clamp(0, v - 1)
        (max_t,) = _row_max((logits_tv,), group)
        target_logit_t = logits_tv.gather(-1, row_t.unsqueeze(-1)).squeeze(-1).masked_fill(~here_t, 0)
        sum_t, target_logit_t = _sum(
            torch.stack([_shifted_exp(logits_tv, max_t).sum(-1), target_logit_t]), group
        )
        lse_t = max_t + sum_t.log()
        ctx.save_for_backward(logits_tv, lse_t, row_t, here_t)
        return target_logit_t - lse_t

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_t: Tensor) -> tuple[Tensor, None, None]:
        logits_tv, lse_t, row_t, here_t = ctx.saved_tensors
        grad_tv = _shifted_exp(logits_tv, lse_t).mul_(-grad_t.unsqueeze(-1))
        grad_tv.scatter_add_(-1, row_t.unsqueeze(-1), grad_t.masked_fill(~here_t, 0).unsqueeze(-1))
        return grad_tv, None, None


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_tv: Tensor, group: Group) -> Tensor:
        (max_t,) = _row_max((logits_tv,), group)
        exp_tv = _shifted_exp(logits_tv, max_t)
        weighted_t = _weighted(exp_tv, logits_tv - max_t.unsqueeze(-1)).sum(-1)
        sum_t, weighted_t = _sum(torch.stack([exp_tv.sum(-1), weighted_t]), group)
        entropy_t = sum_t.log() - weighted_t / sum_t
        ctx.save_for_backward(logits_tv, max_t + sum_t.log(), entropy_t)
        return entropy_t

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_t: Tensor) -> tuple[Tensor, None]:
        logits_tv, lse_t, entropy_t = ctx.saved_tensors
        # dH/dl = -p (l - sum p l), and sum p l = lse - H.
        centred_tv = logits_tv - (lse_t - entropy_t).unsqueeze(-1)
        return _weighted(_shifted_exp(logits_tv, lse_t), centred_tv).mul_(-grad_t.unsqueeze(-1)), None


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_tv: Tensor, target_logits_tv: Tensor, group: Group) -> Tensor:
        max_t, target_max_t = _row_max((logits_tv, target_logits_tv), group)
        target_exp_tv = _shifted_exp(target_logits_tv, target_max_t)
        target_sum_t = target_exp_tv.sum(-1)
        weighted_t = _weighted(target_exp_tv, logits_tv - max_t.unsqueeze(-1)).sum(-1)
        sums = torch.stack([_shifted_exp(logits_tv, max_t).sum(-1), target_sum_t, weighted_t])
        sum_t, target_sum_t, weighted_t = _sum(sums, group)
        ctx.save_for_backward(
            logits_tv, target_logits_tv, max_t + sum_t.log(), target_max_t + target_sum_t.log()
        )
        return sum_t.log() - weighted_t / target_sum_t

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_t: Tensor) -> tuple[Tensor, None, None]:
        logits_tv, target_logits_tv, lse_t, target_lse_t = ctx.saved_tensors
        grad_tv = _shifted_exp(logits_tv, lse_t).sub_(_shifted_exp(target_logits_tv, target_lse_t))
        return grad_tv.mul_(grad_t.unsqueeze(-1)), None, None


def _shifted_exp(logits_tv: Tensor, shift_t: Tensor) -> Tensor:
    return (logits_tv - shift_t.unsqueeze(-1)).exp_()


def _weighted(weight_tv: Tensor, value_tv: Tensor) -> Tensor:
    """weight * value in value's memory, zero where the weight is: a value may be -inf there."""
    return value_tv.mul_(weight_tv).masked_fill_(weight_tv == 0, 0)


def _row_max(logits: tuple[Tensor, ...], group: Group) -> Tensor:
    """Maxima over the vocabulary of several logits, in one collective; the lowest float for a row of -inf."""
    max_nt = torch.stack([x_tv.amax(-1) for x_tv in logits])
    return _all_reduce(max_nt, dist.ReduceOp.MAX, group).clamp(min=torch.finfo(max_nt.dtype).min)


def _sum(x: Tensor, group: Group) -> Tensor:
    return _all_reduce(x, dist.ReduceOp.SUM, group)


def _all_reduce(x: Tensor, op: dist.ReduceOp, group: Group) -> Tensor:
    """Reduce in place over the group.  An empty tensor is empty on all of its ranks, and stays at home."""
    if group is not None and group.size() > 1 and x.numel():
        dist.all_reduce(x, op, group=group)
    return x


def _first_row(v: int, group: Group) -> int:
    return 0 if group is None else group.rank() * v


def wide(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(x.dtype, torch.float32)
