"""One comparison per prefill kernel: the GPU set's against its torch twin, on any device and in any dtype."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from bailing_mtp.kernels.reference import experts as reference_experts
from bailing_mtp.kernels.reference import prefill as twin
from bailing_mtp.kernels.reference.kda_prefill import Pack
from bailing_mtp.rollout.prefill import PrefillPlan
from tests.kernels.decode_cases import Draw, assert_close, poisoned

SEGMENTS = ((3, 0, 1), (0, 2, 15), (1, 0, 17), (2, 5, 2), (5, 64, 70), (4, 0, 64))
"""(slot, tokens before, new tokens): shorter and longer than the convolution and than a chunk."""


def pack_of(device: str, segments: tuple[tuple[int, int, int], ...] = SEGMENTS) -> Pack:
    return PrefillPlan.build(segments, torch.device(device)).pack


def check_short_conv(
    short_conv: Callable, device: str, dtype: torch.dtype, sizes: tuple[int, int, int], taps: int, history: bool
) -> None:
    draw, pack, channels = Draw(device, dtype, 1), pack_of(device), sum(sizes)
    wide_TX = draw.normal(sum(pack.lengths), channels + 24)
    before = draw.normal(len(pack.lengths), taps - 1, channels) if history else None
    arguments = (wide_TX[:, 8 : 8 + channels], draw.normal(channels, taps), pack, before, sizes)
    with poisoned():
        ours = short_conv(*arguments)
    for what, result, expected in zip(("q", "k", "v", "window"), ours, twin.short_conv_qkv(*arguments), strict=True):
        assert_close(result, expected, dtype, what)
    assert torch.equal(ours[3], twin.short_conv_qkv(*arguments)[3])


def check_gated_norm(gated_norm: Callable, device: str, dtype: torch.dtype, T: int, h: int, V: int) -> None:
    draw = Draw(device, dtype, 2)
    o_ThV, wide, weight_V = draw.normal(T, h, V), draw.normal(T, h * V + 40), draw.normal(V)
    arguments = (o_ThV, wide[:, 16 : 16 + h * V], weight_V, 1e-6)
    with poisoned():
        ours = gated_norm(*arguments)
    assert_close(ours, twin.gated_norm(*arguments), dtype, "gated norm")


def check_attend(attend: Callable, device: str, dtype: torch.dtype, h: int, d: int, v: int) -> None:
    draw, pack = Draw(device, dtype, 3), pack_of(device)
    n_keys = sum(pack.key_lengths)
    arguments = (draw.normal(sum(pack.lengths), h, d), draw.normal(n_keys, h, d), draw.normal(n_keys, h, v + 8))
    arguments = (*arguments[:2], arguments[2][..., :v])
    expected = twin.attend(*(x.float() for x in arguments), pack, d**-0.5)
    assert_close(attend(*arguments, pack, d**-0.5), expected.to(dtype), dtype, "attention")


def check_delta_rule(
    delta_rule: Callable, device: str, dtype: torch.dtype, h: int, D: int, bound: float | None, state: bool
) -> None:
    """The twin computes in fp32 from the same rounded inputs."""
    draw, pack = Draw(device, dtype, 4), pack_of(device)
    T, n = sum(pack.lengths), len(pack.lengths)
    wide = draw.normal(T, 4 * h * D + h)
    q, k, v, f, beta = wide.split((h * D, h * D, h * D, h * D, h), dim=1)
    fp32 = torch.float32
    A_log, dt_bias = draw.normal(h, dtype=fp32, scale=0.3), draw.normal(h, D, dtype=fp32) - 2
    before = draw.normal(n, h, D, D, dtype=fp32, scale=0.3) if state else None
    ours_o, ours_state = delta_rule(q, k, v, f, beta, A_log, dt_bias, bound, pack, before)
    inputs = [x.float() for x in (q, k, v, f, beta)]
    o, after = twin.gated_delta_rule(*inputs, A_log, dt_bias, bound, pack, before)
    assert_close(ours_o, o.to(dtype), dtype, "output")
    assert ours_state.dtype == fp32
    assert_close(ours_state.to(dtype), after.to(dtype), dtype, "state")


def check_many_experts(experts: Callable, device: str, dtype: torch.dtype, R: int, H: int, F: int) -> None:
    """All experts of one rank, then a slice of the width of some of them; one expert has no rows."""
    draw, E, k = Draw(device, dtype, 5), 12, 3
    ids_Rk = torch.stack([draw.permutation(E - 1)[:k] for _ in range(R)])
    weights_Rk = draw.normal(R, k, dtype=torch.float32).abs()
    x_RH = draw.normal(R, H)
    for first, n_local, width, limit in ((0, E, (0, F), None), (4, 5, (F // 4, 3 * F // 4), 0.7)):
        gate_up = draw.normal(n_local, 2 * F, H, scale=H**-0.5)
        arguments = (x_RH, ids_Rk, weights_Rk, gate_up, draw.normal(n_local, H, F, scale=F**-0.5), first, width, limit)
        with poisoned():
            ours = experts(*arguments)
        with mock.patch.object(reference_experts, "_grouped", reference_experts._one_by_one):
            expected = twin.experts(*arguments)
        assert_close(ours, expected, dtype, f"experts from {first}")


def relative(ours: Tensor, expected: Tensor) -> float:
    """Norm of the error over the norm of what is expected."""
    assert ours.isfinite().all()
    return float((ours.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))
