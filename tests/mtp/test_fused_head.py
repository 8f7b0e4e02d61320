"""One pass over the logits for each output: the fused head against the composed one, values and gradients."""

import pytest
import torch

from bailing_mtp.kernels.reference import head as kernels
from bailing_mtp.losses.fused_head import LOGITS_PER_CHUNK, fused_chunk_tokens
from bailing_mtp.losses.heads import HeadOptions, HeadOutputs, head_outputs
from tests.mtp import models

VOCAB, HIDDEN = 60, 8
LENGTHS = (11, 1, 2, 16, 9)


def _run(kernels, depths: int, chunk_tokens: int, **options) -> tuple[HeadOutputs, list[torch.Tensor], list]:
    generator = torch.Generator().manual_seed(depths)
    tokens = sum(LENGTHS)
    streams = [torch.randn(tokens, HIDDEN, generator=generator).requires_grad_() for _ in range(depths + 1)]
    head_VH = torch.randn(VOCAB, HIDDEN, generator=generator).requires_grad_()
    batch = models.pack(LENGTHS, vocab=VOCAB)
    chosen = HeadOptions(chunk_tokens, kernels=kernels, with_entropy=True, **options)
    outputs = head_outputs(streams[0], tuple(streams[1:]), head_VH, batch, None, chosen)
    weights = torch.randn(depths + 1, tokens, generator=generator)
    masks = [batch.shift(depth).valid_T for depth in range(depths + 1)]
    losses = [outputs.log_prob_T, *(depth.loss_T for depth in outputs.depths)]
    terms = zip(weights, masks, losses, strict=True)
    sum(torch.where(mask, weight * loss, 0.0).sum() for weight, mask, loss in terms).backward()
    return outputs, [*(x.grad for x in streams), head_VH.grad], masks


@pytest.mark.parametrize("options", [
    {},
    {"detach_mtp": True},
    {"objective": "soft"},
    {"objective": "soft", "temperature": 0.7, "policy_temperature": 0.7},
    {"temperature": 1.3},
    {"policy_temperature": 0.6, "temperature": 0.6, "detach_mtp": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize(("depths", "chunk_tokens"), [(0, 16), (1, 64), (1, 7), (3, 5), (3, 2)])
def test_fused_equals_composed(depths: int, chunk_tokens: int, options: dict):
    ours, our_grads, masks = _run(kernels, depths, chunk_tokens, **options)
    theirs, their_grads, _ = _run(None, depths, chunk_tokens, **options)
    for name in ("log_prob_T", "correct_T", "entropy_T"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=2e-5, rtol=1e-5)
    for mask, our, their in zip(masks[1:], ours.depths, theirs.depths, strict=True):
        for a, b in zip(our, their, strict=True):
            torch.testing.assert_close(a[mask], b[mask], atol=2e-5, rtol=1e-5)
    for a, b in zip(our_grads, their_grads, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


def test_chunks_fill_tiles():
    assert fused_chunk_tokens(157184) == 768 and 768 * 157184 * 4 <= 4 * LOGITS_PER_CHUNK == 2**29
    assert fused_chunk_tokens(10**9) == 128
