"""fla's KDA kernels against the torch twin on the same GPU, forward and backward, from bf16 inputs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bailing_mtp.kernels.reference import kda as twin

pytestmark = pytest.mark.gpu

ODD = (1, 15, 16, 0, 17, 63, 64, 65, 130, 3)
# heads, channels, lengths in tokens
SHAPES = [
    pytest.param(16, 128, (1000, 2048, 1, 500, 547), id="h16-d128-T4096"),
    pytest.param(16, 128, (4096,), id="h16-d128-one-document"),
    pytest.param(2, 64, ODD, id="h2-d64-odd"),
    pytest.param(2, 128, ODD, id="h2-d128-odd"),
]
GATES = [
    pytest.param(-5.0, True, id="bounded-tensor-core"),
    pytest.param(-5.0, False, id="bounded"),
    pytest.param(None, False, id="unbounded"),
]


@pytest.fixture(scope="module")
def fla_kernels():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from bailing_mtp.kernels import kda

    return kda


def _randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def _cu_seqlens(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0)


def _relative(ours: Tensor, expected: Tensor) -> float:
    assert ours.isfinite().all()
    return ((ours.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-12)).item()


def _compare(
    run: Callable[..., tuple[Tensor, ...]],
    rounded: dict[str, Tensor],
    exact: dict[str, Tensor],
    kernels,
    output_error: float = 1e-2,
    grad_error: float = 2e-2,
) -> None:
    """`run(kernels, **inputs)` on bf16 `rounded` inputs and fp32 `exact` ones, against the twin in fp32.

    Errors are norms relative to the norm of the twin's result.
    """
    rounded = {name: x.bfloat16() for name, x in rounded.items()}
    ours = {name: x.clone().requires_grad_() for name, x in (rounded | exact).items()}
    plain = {name: x.float().clone().requires_grad_() for name, x in (rounded | exact).items()}
    our_outputs, outputs = run(kernels, **ours), run(twin, **plain)
    upstream = [_randn(*x.shape, seed=100).bfloat16() for x in outputs]
    torch.autograd.backward(our_outputs, [u.to(x.dtype) for u, x in zip(upstream, our_outputs, strict=True)])
    torch.autograd.backward(outputs, [u.to(x.dtype) for u, x in zip(upstream, outputs, strict=True)])
    errors = {
        f"output {i}": _relative(a, b) for i, (a, b) in enumerate(zip(our_outputs, outputs, strict=True))
    }
    assert max(errors.values()) < output_error, errors
    grads = {name: _relative(ours[name].grad, plain[name].grad) for name in ours}
    assert max(grads.values()) < grad_error, grads


@pytest.mark.parametrize(("lower_bound", "bounded_decay"), GATES)
@pytest.mark.parametrize(("heads", "d", "lengths"), SHAPES)
def test_gate_and_chunk_kda(
    fla_kernels, heads: int, d: int, lengths: tuple[int, ...], lower_bound: float | None, bounded_decay: bool
) -> None:
    T = sum(lengths)

    def run(kernels, q, k, v, f, beta, state, A_log, dt_bias) -> tuple[Tensor, ...]:
        log_decay = kernels.kda_gate(f, A_log, dt_bias, lower_bound)
        return kernels.chunk_kda(
            q, k, v, log_decay, beta, _cu_seqlens(lengths), lengths, state, True, bounded_decay=bounded_decay
        )

    rounded = {name: _randn(T, heads, d, seed=seed) for seed, name in enumerate("qkvf")}
    exact = {
        "beta": _randn(T, heads, seed=10).sigmoid(),
        "state": 0.3 * _randn(len(lengths), heads, d, d, seed=11),
        "A_log": torch.linspace(0, 1, heads, device="cuda"),
        "dt_bias": _randn(heads, d, seed=12) - 2,
    }
    _compare(run, rounded, exact, fla_kernels)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize(("heads", "d", "lengths"), SHAPES)
def test_gated_chunk_kda(
    fla_kernels, heads: int, d: int, lengths: tuple[int, ...], lower_bound: float | None
) -> None:
    T = sum(lengths)

    def run(kernels, q, k, v, f, beta, A_log, dt_bias) -> tuple[Tensor, ...]:
        cu_seqlens = _cu_seqlens(lengths)
        return (kernels.gated_chunk_kda(q, k, v, f, beta, A_log, dt_bias, lower_bound, cu_seqlens, lengths),)

    rounded = {name: _randn(T, heads, d, seed=seed) for seed, name in enumerate("qkvf")}
    rounded["beta"] = _randn(T, heads, seed=10)
    exact = {"A_log": torch.linspace(0, 1, heads, device="cuda"), "dt_bias": _randn(heads, d, seed=12) - 2}
    _compare(run, rounded, exact, fla_kernels)


def test_chunk_kda_without_states(fla_kernels) -> None:
    def run(kernels, q, k, v, log_decay, beta) -> tuple[Tensor, ...]:
        o, final = kernels.chunk_kda(q, k, v, log_decay, beta, _cu_seqlens(ODD), ODD)
        assert final is None
        return (o,)

    rounded = {name: _randn(sum(ODD), 2, 64, seed=seed) for seed, name in enumerate("qkv")}
    exact = {
        "log_decay": -5 * _randn(sum(ODD), 2, 64, seed=3).sigmoid(),
        "beta": _randn(sum(ODD), 2, seed=4).sigmoid(),
    }
    _compare(run, rounded, exact, fla_kernels)


def test_final_state_of_one_part_starts_the_next(fla_kernels) -> None:
    T, first = 200, 77
    inputs = [_randn(T, 2, 64, seed=seed).bfloat16() for seed in range(3)]
    inputs += [-5 * _randn(T, 2, 64, seed=3).sigmoid(), _randn(T, 2, seed=4).sigmoid()]
    whole, final = fla_kernels.chunk_kda(*inputs, _cu_seqlens((T,)), (T,), None, True)
    head, tail = [x[:first] for x in inputs], [x[first:] for x in inputs]
    o_head, between = fla_kernels.chunk_kda(*head, _cu_seqlens((first,)), (first,), None, True)
    rest = (T - first,)
    o_tail, final_tail = fla_kernels.chunk_kda(*tail, _cu_seqlens(rest), rest, between, True)
    assert _relative(torch.cat([o_head, o_tail]), whole) < 1e-2
    assert _relative(final_tail, final) < 1e-2


def test_a_document_of_no_tokens_keeps_its_state(fla_kernels) -> None:
    lengths = (0, 20, 0)
    inputs = [_randn(20, 2, 64, seed=seed).bfloat16() for seed in range(3)]
    inputs += [-5 * _randn(20, 2, 64, seed=3).sigmoid(), _randn(20, 2, seed=4).sigmoid()]
    state = _randn(3, 2, 64, 64, seed=5)
    _, final = fla_kernels.chunk_kda(*inputs, _cu_seqlens(lengths), lengths, state, True)
    torch.testing.assert_close(final[[0, 2]], state[[0, 2]])
    _, final = fla_kernels.chunk_kda(*inputs, _cu_seqlens(lengths), lengths, None, True)
    torch.testing.assert_close(final[[0, 2]], torch.zeros_like(state[[0, 2]]))


@pytest.mark.parametrize("lengths", [None, ODD], ids=["device-lengths", "host-lengths"])
@pytest.mark.parametrize("with_history", [False, True])
def test_short_conv(fla_kernels, with_history: bool, lengths: tuple[int, ...] | None) -> None:
    T, channels = sum(ODD), 384

    def run(kernels, wide, weight, history=None) -> tuple[Tensor, ...]:
        # A slice of a wider row, as the fused projection gives it.
        x = wide[:, 64 : 64 + channels]
        return kernels.short_conv(x, weight, _cu_seqlens(ODD), history, True, lengths)

    rounded = {"wide": _randn(T, 512, seed=0), "weight": _randn(channels, 4, seed=1)}
    if with_history:
        rounded["history"] = _randn(len(ODD), 3, channels, seed=2)
    _compare(run, rounded, {}, fla_kernels)


def test_a_second_layer_does_not_wait_for_the_device(fla_kernels) -> None:
    lengths = (100, 28)
    cu_seqlens = _cu_seqlens(lengths)
    x, weight = _randn(128, 3 * 128, seed=0).bfloat16(), _randn(3 * 128, 4, seed=1).bfloat16()
    beta, A_log, dt_bias = (
        _randn(128, 2, seed=2).sigmoid(),
        torch.zeros(2, device="cuda"),
        _randn(2, 64, seed=3),
    )

    def layer() -> Tensor:
        y = fla_kernels.short_conv(x.requires_grad_(), weight, cu_seqlens, lengths=lengths)
        q, k, v = (part.unflatten(-1, (2, 64)) for part in y.chunk(3, -1))
        log_decay = fla_kernels.kda_gate(k.detach(), A_log, dt_bias, -5.0)
        o, _ = fla_kernels.chunk_kda(q, k, v, log_decay, beta, cu_seqlens, lengths, bounded_decay=True)
        return o

    layer().sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
