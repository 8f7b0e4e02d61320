"""Vocabulary arithmetic on one rank against plain torch: values, gradients, and the chunked head."""

import pytest
import torch
from torch import Tensor

from bailing_mtp.parallel import vocab

TOKENS, VOCABULARY, HIDDEN = 7, 23, 5


@pytest.fixture
def logits_tv() -> Tensor:
    return (
        3 * torch.randn(TOKENS, VOCABULARY, dtype=torch.float64, generator=_generator(0))
    ).requires_grad_()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=_generator(seed))


def _same_value_and_gradient(ours_t: Tensor, plain_t: Tensor, logits_tv: Tensor) -> None:
    torch.testing.assert_close(ours_t, plain_t)
    upstream_t = _randn(*ours_t.shape, seed=9)
    ours, plain = (torch.autograd.grad(x, logits_tv, upstream_t)[0] for x in (ours_t, plain_t))
    torch.testing.assert_close(ours, plain)


def test_log_sum_exp(logits_tv: Tensor) -> None:
    _same_value_and_gradient(vocab.log_sum_exp(logits_tv, None), logits_tv.logsumexp(-1), logits_tv)


def test_log_prob(logits_tv: Tensor) -> None:
    target_t = torch.tensor([0, 22, 5, 5, 11, 1, 21])
    plain_t = logits_tv.log_softmax(-1)[torch.arange(TOKENS), target_t]
    _same_value_and_gradient(vocab.log_prob(logits_tv, target_t, None), plain_t, logits_tv)


def test_log_prob_of_an_ignored_id_is_finite(logits_tv: Tensor) -> None:
    ours_t = vocab.log_prob(logits_tv, torch.full((TOKENS,), -100), None)
    _same_value_and_gradient(ours_t, -logits_tv.logsumexp(-1), logits_tv)


def test_entropy(logits_tv: Tensor) -> None:
    log_p_tv = logits_tv.log_softmax(-1)
    _same_value_and_gradient(vocab.entropy(logits_tv, None), -(log_p_tv.exp() * log_p_tv).sum(-1), logits_tv)


def test_entropy_counts_masked_ids_as_impossible() -> None:
    logits_tv = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]], requires_grad=True)
    entropy_t = vocab.entropy(logits_tv, None)
    torch.testing.assert_close(entropy_t, torch.tensor([2.0]).log())
    torch.testing.assert_close(torch.autograd.grad(entropy_t.sum(), logits_tv)[0], torch.zeros(1, 4))


def test_soft_cross_entropy_does_not_train_its_target(logits_tv: Tensor) -> None:
    target_tv = _randn(TOKENS, VOCABULARY, seed=1).requires_grad_()
    plain_t = -(target_tv.detach().softmax(-1) * logits_tv.log_softmax(-1)).sum(-1)
    ours_t = vocab.soft_cross_entropy(logits_tv, target_tv, None)
    _same_value_and_gradient(ours_t, plain_t, logits_tv)
    vocab.soft_cross_entropy(logits_tv, target_tv, None).sum().backward()
    assert target_tv.grad is None


def test_soft_cross_entropy_with_an_id_masked_in_both() -> None:
    masked_tv = torch.tensor([[1.0, -torch.inf, 0.0]])
    p_tv = torch.tensor([[1.0, 0.0]]).softmax(-1)
    torch.testing.assert_close(
        vocab.soft_cross_entropy(masked_tv, masked_tv, None), -(p_tv * p_tv.log()).sum(-1)
    )


def test_large_logits_do_not_overflow() -> None:
    logits_tv = torch.tensor([[1e4, 1e4 - 1.0], [-1e4, -1e4 - 1.0]])
    plain_t = torch.tensor([1.0, -1.0]) * 1e4 + torch.tensor(1.0).neg().exp().log1p()
    torch.testing.assert_close(vocab.log_sum_exp(logits_tv, None), plain_t)


def test_sum_min(logits_tv: Tensor) -> None:
    q_tv = _randn(TOKENS, VOCABULARY, seed=2)
    plain_t = torch.minimum(logits_tv.softmax(-1), q_tv.softmax(-1)).sum(-1)
    ours_t = vocab.sum_min(logits_tv, q_tv, None)
    torch.testing.assert_close(ours_t, plain_t.detach())
    assert not ours_t.requires_grad


def test_sum_min_by_hand() -> None:
    p_tv, q_tv = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.1, 0.1, 0.8]]).log()
    torch.testing.assert_close(vocab.sum_min(p_tv, q_tv, None), torch.tensor([0.4]))


def test_argmax_names_the_lowest_id_and_bad_rows() -> None:
    nan, inf = torch.nan, torch.inf
    logits_tv = torch.tensor(
        [[1.0, 3.0, 3.0], [-inf, -5.0, -inf], [0.0, nan, 9.0], [-inf, -inf, -inf], [0.0, inf, 1.0]]
    )
    id_t, finite_t = vocab.argmax(logits_tv, None)
    assert id_t.tolist() == [1, 1, 0, 0, 0]
    assert finite_t.tolist() == [True, True, False, False, False]


def test_gumbel_argmax_samples_the_softmax() -> None:
    draws = 40_000
    p_v = torch.tensor([0.5, 0.25, 0.15, 0.1])
    gumbel_tv = -torch.rand(draws, 4, generator=_generator(3)).log().neg().log()
    id_t, finite_t = vocab.gumbel_argmax(p_v.log().expand(draws, 4), gumbel_tv, None)
    assert finite_t.all()
    torch.testing.assert_close(id_t.bincount(minlength=4) / draws, p_v, atol=0.01, rtol=0)


def _chunk_fn(logits_tv: Tensor, target_t: Tensor) -> tuple[Tensor, ...]:
    id_t, _ = vocab.argmax(logits_tv, None)
    return (
        vocab.log_prob(logits_tv, target_t, None),
        vocab.entropy(logits_tv, None),
        (id_t == target_t).float(),
    )


def _head(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    hidden_TH = _randn(TOKENS, HIDDEN, seed=4).to(dtype).requires_grad_()
    weight_vH = _randn(VOCABULARY, HIDDEN, seed=5).to(dtype).requires_grad_()
    return hidden_TH, weight_vH, torch.randint(VOCABULARY, (TOKENS,), generator=_generator(6))


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
def test_head_apply_equals_the_whole_head(chunk_tokens: int) -> None:
    hidden_TH, weight_vH, target_T = _head()
    ours = vocab.head_apply(hidden_TH, weight_vH, _chunk_fn, (target_T,), chunk_tokens)
    plain = _chunk_fn(hidden_TH @ weight_vH.t(), target_T)
    upstream_T = [_randn(TOKENS, seed=7), _randn(TOKENS, seed=8)]
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, check_dtype=False)
    for a, b in zip(
        torch.autograd.grad(ours[:2], (hidden_TH, weight_vH), upstream_T),
        torch.autograd.grad(plain[:2], (hidden_TH, weight_vH), upstream_T),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_head_apply_gradcheck() -> None:
    hidden_TH, weight_vH, target_T = _head()

    def losses(hidden_TH: Tensor, weight_vH: Tensor) -> tuple[Tensor, ...]:
        return vocab.head_apply(hidden_TH, weight_vH, _chunk_fn, (target_T,), 3)[:2]

    assert torch.autograd.gradcheck(losses, (hidden_TH, weight_vH))


def test_head_apply_with_one_output_unused_and_one_without_gradient() -> None:
    hidden_TH, weight_vH, target_T = _head()
    _, entropy_T, hit_T = vocab.head_apply(hidden_TH, weight_vH, _chunk_fn, (target_T,), 3)
    (entropy_T.sum() + hit_T.sum()).backward()
    plain_TV = (hidden_TH.detach() @ weight_vH.detach().t()).requires_grad_()
    vocab.entropy(plain_TV, None).sum().backward()
    torch.testing.assert_close(hidden_TH.grad, plain_TV.grad @ weight_vH.detach())
    torch.testing.assert_close(weight_vH.grad, plain_TV.grad.t() @ hidden_TH.detach())


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_head_apply_trains_only_what_wants_a_gradient(trained: str) -> None:
    hidden_TH, weight_vH, target_T = _head()
    vocab.head_apply(hidden_TH, weight_vH, _chunk_fn, (target_T,), 3)[0].sum().backward()
    expected = {"hidden": hidden_TH.grad, "weight": weight_vH.grad}[trained]
    inputs = {"hidden": hidden_TH.detach(), "weight": weight_vH.detach()}
    inputs[trained].requires_grad_()
    vocab.head_apply(inputs["hidden"], inputs["weight"], _chunk_fn, (target_T,), 3)[0].sum().backward()
    torch.testing.assert_close(inputs[trained].grad, expected)
    assert sum(tensor.grad is not None for tensor in inputs.values()) == 1


def test_head_apply_of_no_tokens_gives_zero_gradients() -> None:
    hidden_TH, weight_vH, target_T = _head()
    hidden_TH = hidden_TH.detach()[:0].requires_grad_()
    outputs = vocab.head_apply(hidden_TH, weight_vH, _chunk_fn, (target_T[:0],), 3)
    assert [output.shape for output in outputs] == [(0,)] * 3
    outputs[0].sum().backward()
    assert hidden_TH.grad.shape == (0, HIDDEN)
    torch.testing.assert_close(weight_vH.grad, torch.zeros_like(weight_vH))


def test_bf16_weights_give_unrounded_logits_and_a_gradient_summed_in_fp32() -> None:
    hidden_TH, weight_vH, target_T = _head(torch.bfloat16)
    wide_hidden_TH, wide_weight_vH = (x.detach().float().requires_grad_() for x in (hidden_TH, weight_vH))
    logits_TV = vocab.head_logits(hidden_TH.detach(), weight_vH.detach())
    assert logits_TV.dtype == torch.float32
    torch.testing.assert_close(logits_TV, wide_hidden_TH.detach() @ wide_weight_vH.detach().t())
    for hidden, weight in ((hidden_TH, weight_vH), (wide_hidden_TH, wide_weight_vH)):
        vocab.head_apply(hidden, weight, _chunk_fn, (target_T,), 1)[0].sum().backward()
    assert weight_vH.grad.dtype == hidden_TH.grad.dtype == torch.bfloat16
    torch.testing.assert_close(weight_vH.grad, wide_weight_vH.grad.bfloat16())
    torch.testing.assert_close(hidden_TH.grad, wide_hidden_TH.grad.bfloat16())


def test_head_apply_never_holds_more_than_a_chunk_of_logits() -> None:
    hidden_TH, weight_vH, target_T = _head()
    sizes = []

    def chunk_fn(logits_tv: Tensor, target_t: Tensor) -> tuple[Tensor, ...]:
        sizes.append(logits_tv.shape[0])
        return (vocab.log_prob(logits_tv, target_t, None),)

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        (log_prob_T,) = vocab.head_apply(hidden_TH, weight_vH, chunk_fn, (target_T,), 3)
    log_prob_T.sum().backward()
    assert sizes == [3, 3, 1, 3, 3, 1]
    assert sorted(kept) == sorted([hidden_TH.shape, weight_vH.shape, target_T.shape])


def test_head_apply_refuses_per_token_tensors_that_want_a_gradient() -> None:
    hidden_TH, weight_vH, _ = _head()
    with pytest.raises(AssertionError, match="per-token tensor 0 wants a gradient"):
        vocab.head_apply(hidden_TH, weight_vH, _chunk_fn, (torch.zeros(TOKENS, requires_grad=True),), 3)
