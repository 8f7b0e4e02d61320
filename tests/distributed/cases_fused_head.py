"""The one-pass head on several tensor-parallel ranks: every rank compares its shard with the whole."""

import torch
import torch.distributed as dist
from torch import Tensor

from bailing_mtp.kernels.reference import head as kernels
from bailing_mtp.losses.heads import HeadOptions, HeadOutputs, head_outputs
from tests.mtp import models

LENGTHS, ROWS_PER_RANK, HIDDEN, DEPTHS = (9, 4, 1, 7), 11, 6, 2
TOKENS = sum(LENGTHS)


def check_fused_head(group: dist.ProcessGroup, rank: int, world: int) -> None:
    """Raise AssertionError unless outputs and gradients on `world` ranks equal those on one."""
    vocab = world * ROWS_PER_RANK
    for options in ({}, {"objective": "soft", "temperature": 0.8, "policy_temperature": 0.8}):
        whole, whole_grads = _run(None, vocab, slice(None), **options)
        ours, our_grads = _run(group, vocab, slice(rank * ROWS_PER_RANK, (rank + 1) * ROWS_PER_RANK), **options)
        pairs = list(zip(_values(ours), _values(whole), strict=True))
        for index, (our, expected) in enumerate(pairs):
            torch.testing.assert_close(our, expected, atol=2e-5, rtol=1e-5, msg=lambda m, i=index: f"output {i}: {m}")
        *stream_grads, weight_grad = our_grads
        for grad in stream_grads:
            dist.all_reduce(grad, group=group)
        expected = whole_grads[-1][rank * ROWS_PER_RANK : (rank + 1) * ROWS_PER_RANK]
        for our, their in zip([*stream_grads, weight_grad], [*whole_grads[:-1], expected], strict=True):
            torch.testing.assert_close(our, their, atol=2e-5, rtol=1e-5)


def _values(outputs: HeadOutputs) -> list[Tensor]:
    depths = [values_T for depth in outputs.depths for values_T in depth]
    return [outputs.log_prob_T, outputs.correct_T, outputs.entropy_T, *depths]


def _run(
    group: dist.ProcessGroup | None, vocab: int, rows: slice, **options: object
) -> tuple[HeadOutputs, list[Tensor]]:
    generator = torch.Generator().manual_seed(4)
    streams = [torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_() for _ in range(DEPTHS + 1)]
    weight_vH = (3 * torch.randn(vocab, HIDDEN, generator=generator))[rows].clone().requires_grad_()
    batch = models.pack(LENGTHS, vocab=vocab)
    chosen = HeadOptions(chunk_tokens=5, kernels=kernels, with_entropy=True, **options)
    outputs = head_outputs(streams[0], tuple(streams[1:]), weight_vH, batch, group, chosen)
    losses = [outputs.log_prob_T, *(depth.loss_T for depth in outputs.depths)]
    upstream = torch.randn(DEPTHS + 1, TOKENS, generator=generator)
    sum((weight * loss).sum() for weight, loss in zip(upstream, losses, strict=True)).backward()
    return outputs, [*(x.grad for x in streams), weight_vH.grad]
