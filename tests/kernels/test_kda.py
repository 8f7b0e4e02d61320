"""The KDA twin: chunked == token by token == fla's naive recurrence, in values and gradients."""

import math

import pytest
import torch
from torch import Tensor

from bailing_mtp.kernels.reference.kda import chunk_kda, kda_gate, recurrent_kda

LENGTHS = (1, 15, 0, 16, 17, 63, 130, 16)


def _inputs(lengths: tuple[int, ...], d: int = 8, v: int = 6, h: int = 2, dtype: torch.dtype = torch.float64):
    """q, k, v, log decay, beta, initial state (all want gradients), and cu_seqlens."""
    generator, T = torch.Generator().manual_seed(sum(lengths)), sum(lengths)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = [
        randn(T, h, d),
        randn(T, h, d),
        randn(T, h, v),
        -5 * torch.sigmoid(2 * randn(T, h, d)),
        torch.sigmoid(randn(T, h)),
        randn(len(lengths), h, d, v),
    ]
    return [x.to(dtype).requires_grad_() for x in tensors], torch.tensor([0, *lengths]).cumsum(0)


def _run(kda, tensors: list[Tensor], cu_seqlens: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    """Output, final state, and the gradients of all inputs for a fixed upstream gradient of both."""
    *inputs, state = tensors
    o, final = kda(*inputs, cu_seqlens, lengths, state, True)
    generator = torch.Generator().manual_seed(1)
    upstream = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (o, final)
    ]
    return [o, final, *torch.autograd.grad((o, final), tensors, upstream)]


def _assert_all_close(ours: list[Tensor], expected: list[Tensor], **tolerance: float) -> None:
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def test_two_tokens_by_hand() -> None:
    # One head, one channel: q and k normalise to 1 (up to eps), d^-1/2 is 1.
    v_Thv, beta_Th = torch.tensor([3.0, 5.0]).view(2, 1, 1), torch.tensor([[0.5], [0.25]])
    log_decay_Thd = torch.tensor([0.5, 0.8]).log().view(2, 1, 1)
    state_1 = 0.5 * 10 + 0.5 * (3 - 0.5 * 10)  # 4
    state_2 = 0.8 * state_1 + 0.25 * (5 - 0.8 * state_1)  # 3.65
    for kda in (chunk_kda, recurrent_kda):
        o_Thv, final_Nhkv = kda(
            torch.full((2, 1, 1), 2.0),
            torch.full((2, 1, 1), 7.0),
            v_Thv,
            log_decay_Thd,
            beta_Th,
            torch.tensor([0, 2]),
            (2,),
            torch.full((1, 1, 1, 1), 10.0),
            True,
        )
        torch.testing.assert_close(o_Thv.flatten(), torch.tensor([state_1, state_2]), atol=1e-5, rtol=0)
        torch.testing.assert_close(final_Nhkv.flatten(), torch.tensor([state_2]), atol=1e-5, rtol=0)


def test_chunked_equals_recurrent() -> None:
    tensors, cu_seqlens = _inputs(LENGTHS)
    _assert_all_close(
        _run(chunk_kda, tensors, cu_seqlens, LENGTHS), _run(recurrent_kda, tensors, cu_seqlens, LENGTHS)
    )


def test_both_equal_fla_naive() -> None:
    naive = pytest.importorskip("fla.ops.kda.naive")
    tensors, cu_seqlens = _inputs(LENGTHS, dtype=torch.float32)

    def fla_kda(q, k, v, log_decay, beta, cu_seqlens, lengths, state, _):
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        outputs, finals = [], []
        for n, span in enumerate(torch.arange(len(q)).split(lengths)):
            document = [x[span].unsqueeze(0) for x in (q, k, v, log_decay, beta)]
            o, final = naive.naive_recurrent_kda(
                *document, initial_state=state[n : n + 1], output_final_state=True
            )
            outputs.append(o[0])
            finals.append(final[0])
        return torch.cat(outputs), torch.stack(finals)

    expected = _run(fla_kda, tensors, cu_seqlens, LENGTHS)
    for kda in (chunk_kda, recurrent_kda):
        _assert_all_close(_run(kda, tensors, cu_seqlens, LENGTHS), expected, atol=2e-5, rtol=2e-5)


def test_a_document_does_not_see_its_neighbours() -> None:
    tensors, cu_seqlens = _inputs((5, 20, 7))
    o, final = chunk_kda(*tensors[:5], cu_seqlens, (5, 20, 7), tensors[5], True)
    alone = [x[5:25] for x in tensors[:5]]
    o_alone, final_alone = chunk_kda(*alone, torch.tensor([0, 20]), (20,), tensors[5][1:2], True)
    torch.testing.assert_close(o[5:25], o_alone)
    torch.testing.assert_close(final[1:2], final_alone)


@pytest.mark.parametrize("first", [1, 16, 23, 39])
def test_two_parts_with_the_state_between_equal_the_whole(first: int) -> None:
    (*inputs, state), cu_seqlens = _inputs((40,))
    o, final = chunk_kda(*inputs, cu_seqlens, (40,), state, True)
    head, tail = [x[:first] for x in inputs], [x[first:] for x in inputs]
    o_head, between = chunk_kda(*head, torch.tensor([0, first]), (first,), state, True)
    o_tail, final_tail = chunk_kda(*tail, torch.tensor([0, 40 - first]), (40 - first,), between, True)
    torch.testing.assert_close(torch.cat([o_head, o_tail]), o)
    torch.testing.assert_close(final_tail, final)


def test_no_initial_state_is_a_zero_state_and_final_state_is_optional() -> None:
    (*inputs, state), cu_seqlens = _inputs((3, 18))
    o, final = chunk_kda(*inputs, cu_seqlens, (3, 18))
    o_zero, _ = chunk_kda(*inputs, cu_seqlens, (3, 18), torch.zeros_like(state))
    assert final is None
    torch.testing.assert_close(o, o_zero)


def test_gradcheck() -> None:
    lengths = (2, 18)
    tensors, cu_seqlens = _inputs(lengths, d=3, v=2, h=1)

    def kda(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return chunk_kda(*tensors[:5], cu_seqlens, lengths, tensors[5], True)

    assert torch.autograd.gradcheck(kda, tensors)


def test_extreme_decays_stay_finite_and_exact() -> None:
    (*inputs, state), cu_seqlens = _inputs((50,))
    with torch.no_grad():
        inputs[3][::3], inputs[3][1::3] = -800.0, -1e-6
    expected = _run(recurrent_kda, [*inputs, state], cu_seqlens, (50,))
    _assert_all_close(_run(chunk_kda, [*inputs, state], cu_seqlens, (50,)), expected)
    wide = [x.detach().float().requires_grad_() for x in (*inputs, state)]
    single = _run(chunk_kda, wide, cu_seqlens, (50,))
    _assert_all_close(single, [x.float() for x in expected], atol=1e-4, rtol=1e-4)


def test_bf16_inputs_are_computed_in_fp32() -> None:
    tensors, cu_seqlens = _inputs((30, 4), dtype=torch.bfloat16)
    o, final = chunk_kda(*tensors[:5], cu_seqlens, (30, 4), tensors[5], True)
    assert o.dtype == torch.bfloat16
    assert final.dtype == torch.float32
    wide = [x.float() for x in tensors]
    o_wide, final_wide = recurrent_kda(*wide[:5], cu_seqlens, (30, 4), wide[5], True)
    torch.testing.assert_close(final, final_wide, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(o, o_wide.bfloat16(), atol=1e-4, rtol=8e-3)


def test_no_tokens() -> None:
    tensors, cu_seqlens = _inputs((0, 0))
    o, final, *grads = _run(chunk_kda, tensors, cu_seqlens, (0, 0))
    assert o.shape == (0, 2, 6)
    torch.testing.assert_close(final, tensors[5].detach())
    assert [grad.shape for grad in grads] == [x.shape for x in tensors]
    o, final = recurrent_kda(*tensors[:5], cu_seqlens, (0, 0), tensors[5], True)
    assert o.shape == (0, 2, 6)
    torch.testing.assert_close(final, tensors[5].detach())


def test_a_plan_made_in_inference_mode_serves_training() -> None:
    tensors, cu_seqlens = _inputs((9, 2, 31))
    with torch.inference_mode():
        chunk_kda(*tensors[:5], cu_seqlens, (9, 2, 31))
    chunk_kda(*tensors[:5], cu_seqlens, (9, 2, 31))[0].sum().backward()
    assert tensors[0].grad.isfinite().all()


def test_gates_by_hand() -> None:
    f_Thd = torch.tensor([[[0.5, -1.0]]])
    A_log_h, dt_bias_hd = torch.tensor([math.log(2.0)]), torch.tensor([[0.25, 0.0]])
    safe = kda_gate(f_Thd, A_log_h, dt_bias_hd, -5.0)
    torch.testing.assert_close(safe, -5 / (1 + torch.tensor([[[-1.5, 2.0]]]).exp()))
    plain = kda_gate(f_Thd, A_log_h, dt_bias_hd, None)
    torch.testing.assert_close(plain, -2 * torch.log1p(torch.tensor([[[0.75, -1.0]]]).exp()))


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gates_equal_fla_naive(lower_bound: float | None) -> None:
    gate = pytest.importorskip("fla.ops.kda.gate")
    generator = torch.Generator().manual_seed(0)
    f, A_log, dt_bias = (torch.randn(*shape, generator=generator) for shape in ((9, 2, 4), (2,), (2, 4)))
    f[0] = 30.0  # where softplus is linear
    if lower_bound is None:
        expected = gate.naive_kda_gate(f, A_log, dt_bias)
    else:
        expected = gate.naive_kda_lowerbound_gate(f, A_log, dt_bias, lower_bound)
    ours = kda_gate(f.bfloat16(), A_log, dt_bias, lower_bound)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(kda_gate(f, A_log, dt_bias, lower_bound), expected)
