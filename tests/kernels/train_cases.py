"""One comparison per training kernel: the Triton set against its torch twin, on any device and in any dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from bailing_mtp.kernels.reference import head as head_twin
from bailing_mtp.kernels.reference import train as twin
from tests.kernels.decode_cases import Draw, assert_close, poisoned


def _compare(ours: object, theirs: object, dtype: torch.dtype, what: str) -> None:
    pair = [x if isinstance(x, tuple) else (x,) for x in (ours, theirs)]
    for index, (our, their) in enumerate(zip(*pair, strict=True)):
        if their is None:
            assert our is None
        elif their.is_floating_point():
            assert_close(our, their, dtype, f"{what} {index}")
        else:
            assert torch.equal(our, their), f"{what} {index}"


def check_swiglu(kernels, device: str, dtype: torch.dtype, *, R: int, F: int, limit: float | None, weighted: bool):
    draw = Draw(device, dtype, R + F)
    gate_up, grad = draw.normal(R, 2 * F, scale=2.0), draw.normal(R, F)
    weights = draw.normal(R, dtype=torch.float32).abs() if weighted else None
    with poisoned():
        ours = kernels.weighted_swiglu(gate_up, weights, limit)
        our_grads = kernels.weighted_swiglu_grad(grad, gate_up, weights, limit)
    _compare(ours, twin.weighted_swiglu(gate_up, weights, limit), dtype, "swiglu")
    _compare(our_grads, twin.weighted_swiglu_grad(grad, gate_up, weights, limit), dtype, "swiglu gradient")


def check_gated_norm(kernels, device: str, dtype: torch.dtype, *, T: int, h: int, V: int):
    draw = Draw(device, dtype, T + V)
    x, grad, weight = draw.normal(T, h, V), draw.normal(T, h, V), 1 + draw.normal(V, scale=0.1)
    # As the fused projection gives it: a slice of a wider row.
    gate = draw.normal(T, h * V + 40)[:, 24 : 24 + h * V].unflatten(-1, (h, V))
    with poisoned():
        ours = kernels.gated_norm(x, gate, weight, 1e-6)
        our_grads = kernels.gated_norm_grad(grad, x, gate, weight, 1e-6)
    _compare(ours, twin.gated_norm(x, gate, weight, 1e-6), dtype, "gated norm")
    _compare(our_grads, twin.gated_norm_grad(grad, x, gate, weight, 1e-6), dtype, "gated norm gradient")


def check_sum_choices(kernels, device: str, dtype: torch.dtype, *, T: int, k: int, H: int):
    draw = Draw(device, dtype, T + H)
    y, place = draw.normal(T * k, H), draw.permutation(T * k).view(T, k)
    # All rows; the first half of them, what follows being no rows of this tensor; none.
    for A in (T * k, T * k // 2, 0):
        with poisoned():
            ours = kernels.sum_choices(y[:A], place)
        _compare(ours, twin.sum_choices(y[:A], place), dtype, f"sum of {A} choices")
        for t in (0, T - 1):
            rows = [y[row].double() for row in place[t].tolist() if row < A]
            plain = sum(rows, torch.zeros(H, dtype=torch.float64, device=device))
            assert_close(ours[t], plain.to(dtype), dtype, f"plain sum of {A} choices")


def check_choose(kernels, device: str, *, R: int, E: int, k: int, groups: int, kept: int):
    draw = Draw(device, torch.float32, R + E)
    arguments = (draw.normal(R, E), draw.normal(E, scale=0.1), groups, kept, k, 2.5)
    with poisoned():
        ids, weights = kernels.choose(*arguments)
    their_ids, their_weights = twin.choose(*arguments)
    assert torch.equal(ids, their_ids)
    torch.testing.assert_close(weights, their_weights, rtol=1e-5, atol=1e-6)


def check_head(kernels, device: str, dtype: torch.dtype, *, t: int, v: int, scale: float):
    """Kernels over logits, which are fp32 whatever the dtype of their gradients is."""
    draw = Draw(device, torch.float32, t + v)
    wide_p, wide_q = (draw.normal(t, v + 3, scale=4.0) for _ in range(2))
    p, q = wide_p[:, :v], wide_q[:, :v]
    p[0, : v // 2], p[-1, 1], q[-1, 2] = -torch.inf, 30.0, 30.0
    # Equal largest logits, and targets of other ranks.
    p[1, v // 3], p[1, v // 2] = 50.0, 50.0
    target, grad = draw.integers(0, v, t), draw.normal(t)
    target[0], target[1] = -1, v
    with poisoned():
        ours = tuple(kernels.row_stats(p, target, scale))
    theirs = head_twin.row_stats(p, target, scale)
    _compare(ours, tuple(theirs), torch.float32, "row statistics")
    p_lse, q_lse = theirs.max_t + theirs.sum_t.log(), (q * scale).logsumexp(-1)
    rows = draw.integers(0, t, t - 2)
    rows[-1] = t - 1
    q, q_lse, some_grad = q[2:], q_lse[2:], grad[2:]
    soft_inputs = (q, q.logsumexp(-1), p, p.logsumexp(-1), rows, some_grad, dtype)
    with poisoned():
        our_pair = kernels.pair_stats(p, p_lse, rows, q, q_lse, scale)
        our_grad = kernels.target_grad(p, p_lse, target, grad, scale, dtype)
        our_soft = kernels.soft_grad(*soft_inputs)
    _compare(our_pair, head_twin.pair_stats(p, p_lse, rows, q, q_lse, scale), torch.float32, "pair statistics")
    _compare(our_grad, head_twin.target_grad(p, p_lse, target, grad, scale, dtype), dtype, "target gradient")
    _compare(our_soft, head_twin.soft_grad(*soft_inputs), dtype, "soft gradient")


def check_nan_row(kernels, device: str):
    """A NaN among the logits must not vanish from the sum."""
    logits: Tensor = torch.zeros(2, 5000, device=device)
    logits[1, 4321] = torch.nan
    stats = kernels.row_stats(logits, torch.zeros(2, dtype=torch.int64, device=device), 1.0)
    assert stats.sum_t.isnan().tolist() == [False, True]
