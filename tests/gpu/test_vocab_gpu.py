"""The chunked output head on a GPU: bf16 weights, fp32 logits, gradients summed in fp32, bounded memory."""

import pytest
import torch
from torch import Tensor

from bailing_mtp.parallel import vocab

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _needs_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")


def _inputs(tokens: int, vocabulary: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden_TH = torch.randn(tokens, hidden, device="cuda", generator=generator)
    weight_vH = torch.randn(vocabulary, hidden, device="cuda", generator=generator) / hidden**0.5
    target_T = torch.randint(vocabulary, (tokens,), device="cuda", generator=generator)
    return hidden_TH.bfloat16().requires_grad_(), weight_vH.bfloat16().requires_grad_(), target_T


def _chunk_fn(logits_tv: Tensor, target_t: Tensor) -> tuple[Tensor, ...]:
    return vocab.log_prob(logits_tv, target_t, None), vocab.entropy(logits_tv, None)


def test_bf16_head_equals_the_fp32_head() -> None:
    hidden_TH, weight_vH, target_T = _inputs(300, 4001, 256)
    wide_hidden_TH, wide_weight_vH = (x.detach().float().requires_grad_() for x in (hidden_TH, weight_vH))
    logits_TV = vocab.head_logits(hidden_TH.detach(), weight_vH.detach())
    assert logits_TV.dtype == torch.float32
    expected_TV = (wide_hidden_TH.detach().double() @ wide_weight_vH.detach().double().t()).float()
    torch.testing.assert_close(logits_TV, expected_TV, atol=2e-5, rtol=1e-5)
    for hidden, weight in ((hidden_TH, weight_vH), (wide_hidden_TH, wide_weight_vH)):
        log_prob_T, entropy_T = vocab.head_apply(hidden, weight, _chunk_fn, (target_T,), 64)
        (log_prob_T.sum() + 0.1 * entropy_T.sum()).backward()
    for ours, exact in ((hidden_TH.grad, wide_hidden_TH.grad), (weight_vH.grad, wide_weight_vH.grad)):
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - exact).norm() / exact.norm() < 5e-3


def test_memory_grows_with_the_chunk_not_with_the_tokens() -> None:
    tokens, vocabulary, hidden, chunk_tokens = 4096, 32768, 256, 128
    hidden_TH, weight_vH, target_T = _inputs(tokens, vocabulary, hidden)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    log_prob_T, _ = vocab.head_apply(hidden_TH, weight_vH, _chunk_fn, (target_T,), chunk_tokens)
    log_prob_T.sum().backward()
    peak_bytes = torch.cuda.max_memory_allocated() - before_bytes
    chunk_bytes = chunk_tokens * vocabulary * 4
    gradient_bytes = vocabulary * hidden * (4 + 2) + tokens * hidden * 4
    assert peak_bytes < 6 * chunk_bytes + 2 * gradient_bytes


def test_argmax_takes_the_lowest_of_equal_logits() -> None:
    logits_tv = torch.zeros(64, 100_003, device="cuda")
    logits_tv[:, 70_000:] = 1
    id_t, finite_t = vocab.argmax(logits_tv, None)
    assert finite_t.all()
    assert (id_t == 70_000).all()
