"""One comparison per decode kernel: the Triton set against its torch twin, on any device and in any dtype.

Outputs that nothing wrote show: `poisoned()` makes every new tensor NaN, and caches hold NaN wherever a kernel
must not look.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor

from bailing_mtp.kernels.reference import decode as twin
from bailing_mtp.kernels.reference import experts as reference_experts

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2}
"""Norm of the error relative to the norm of the twin's result."""


class Draw:
    """Random tensors of one device and dtype."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(*shape, generator=self.generator) * scale
        return x.to(self.device, dtype or self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator).to(self.device)

    def nans(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.full(shape, torch.nan, device=self.device, dtype=dtype or self.dtype)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """New floating tensors of torch.empty hold NaN, integers -1."""
    empty = torch.empty

    def filled(*size: int, **options: object) -> Tensor:
        tensor = empty(*size, **options)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else -1)

    with mock.patch.object(torch, "empty", filled):
        yield


def relative_error(ours: Tensor, expected: Tensor) -> float:
    ours, expected = ours.double(), expected.double()
    return ((ours - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def assert_close(ours: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    """Equal shapes, dtypes and NaN; all else within the tolerance of `dtype`."""
    assert ours.shape == expected.shape and ours.dtype == expected.dtype, what
    assert torch.equal(ours.isnan(), expected.isnan()), f"{what}: NaN in other places"
    if ours.numel():
        error = relative_error(ours.nan_to_num(), expected.nan_to_num())
        assert error <= TOLERANCE[dtype], f"{what}: relative error {error:.2e}"


def kda_memory(
    draw: Draw, slots: int, records: int, taps: int, h: int, D: int, V: int
) -> twin.KdaLayerMemory:
    """Memory of a fresh sequence in every slot but the last, whose values are anything."""
    channels, N = h * (2 * D + V), slots + 1
    memory = twin.KdaLayerMemory(
        draw.normal(N, h, V, D, scale=0.1, dtype=torch.float32),
        draw.nans(2, N, taps - 1 + records, channels),
        draw.nans(2, N, records, h, D, dtype=torch.float32),
        draw.nans(2, N, records, h, D, dtype=torch.float32),
        draw.nans(2, N, records, h, V, dtype=torch.float32),
    )
    memory.window_2NwX[0, :, : taps - 1] = draw.normal(N, taps - 1, channels)
    return memory


def kda_weights(draw: Draw, taps: int, h: int, D: int, V: int) -> tuple[Tensor, ...]:
    return (
        draw.normal(h * (2 * D + V), taps, scale=0.5),
        draw.normal(h, scale=0.5, dtype=torch.float32),
        draw.normal(h, D, dtype=torch.float32),
        1 + draw.normal(V, scale=0.1),
    )


def check_kda_verify(
    kernels: ModuleType,
    device: str,
    dtype: torch.dtype,
    *,
    rows: int,
    slots: int,
    tokens: tuple[int, ...],
    h: int,
    D: int,
    V: int,
    lower_bound: float | None = -5.0,
    taps: int = 4,
) -> None:
    """Steps of changing width with random accept counts; two rows more are padding on the scratch slot."""
    draw, records = Draw(device, dtype, rows + h), max(tokens)
    memory = kda_memory(draw, slots, records, taps, h, D, V)
    weights = kda_weights(draw, taps, h, D, V)
    theirs = twin.KdaLayerMemory(*(field.clone() for field in memory))
    count_N, parity_N = (torch.zeros(slots + 1, dtype=torch.int32, device=device) for _ in range(2))
    for number, S in enumerate(tokens):
        slots_n = torch.cat([draw.permutation(slots)[:rows], torch.full((2,), slots, device=device)])
        projected = draw.normal((rows + 2) * S, h * (3 * D + 2 * V + 1))
        settings = (count_N, parity_N, slots_n, S, lower_bound, 1e-6)
        with poisoned():
            ours_o = kernels.kda_verify(projected, *weights, memory, *settings)
        their_o = twin.kda_verify(projected, *weights, theirs, *settings)
        assert_close(ours_o[: rows * S], their_o[: rows * S], dtype, f"output of step {number}")
        for name, ours_x, their_x in zip(memory._fields, memory, theirs, strict=True):
            axis = 0 if name.startswith("state") else 1
            ours_x, their_x = (x.narrow(axis, 0, slots) for x in (ours_x, their_x))
            assert_close(ours_x, their_x, dtype, f"{name} of step {number}")
        real_n = slots_n[:rows]
        count_N[real_n] = draw.integers(0, S + 1, rows).to(torch.int32)
        parity_N[real_n] = 1 - parity_N[real_n]


def check_mla_verify(
    kernels: ModuleType,
    device: str,
    dtype: torch.dtype,
    *,
    positions: tuple[int, ...],
    S: int,
    h: int,
    C: int,
    r: int,
    block_tokens: int,
    max_blocks: int,
) -> None:
    """Sequences of any length in scattered blocks; what lies past each sequence is NaN."""
    n, x = len(positions), C + r
    draw = Draw(device, dtype, n * S + h)
    latents = draw.nans(n * max_blocks + 3, block_tokens, x)
    wide_table = draw.permutation(n * max_blocks + 2)[: n * max_blocks].view(n, max_blocks).to(torch.int32)
    for row, position in enumerate(positions):
        length = min(position + S, max_blocks * block_tokens)
        at = torch.arange(length, device=device)
        latents[wide_table[row].long()[at // block_tokens], at % block_tokens] = draw.normal(length, x)
    arguments = (
        draw.normal(n, S, h, x),
        latents,
        wide_table,
        torch.tensor(positions, device=device),
        x**-0.5,
        C,
    )
    with poisoned():
        ours = kernels.mla_verify(*arguments)
    assert_close(ours, twin.mla_verify(*arguments), dtype, f"positions {positions}, S {S}")


def check_write_latents(
    kernels: ModuleType,
    device: str,
    dtype: torch.dtype,
    *,
    T: int,
    x: int,
    block_tokens: int,
    max_blocks: int,
) -> None:
    """Positions inside the table, and some past it, which go to the scratch block."""
    draw, context = Draw(device, dtype, T), block_tokens * max_blocks
    table = draw.permutation(T * max_blocks).view(T, max_blocks).to(torch.int32)
    position = torch.arange(T, device=device) * 5 % context
    position[1::7] = context + draw.integers(0, 4, len(position[1::7]))
    rows = draw.normal(T, x + 3)[:, :x]
    ours, theirs = (draw.nans(T * max_blocks + 1, block_tokens, x) for _ in range(2))
    kernels.write_latents(rows, ours, table, position)
    twin.write_latents(rows, theirs, table, position)
    assert torch.equal(ours[:-1].nan_to_num(7), theirs[:-1].nan_to_num(7))
    # Several tokens may meet in the scratch block: it holds one of them.
    assert torch.equal(ours[-1].isnan(), theirs[-1].isnan())


def check_apply_rope(kernels: ModuleType, device: str, dtype: torch.dtype, *, T: int, h: int, r: int) -> None:
    draw = Draw(device, dtype, T + h)
    table = kernels.rope_table(draw.integers(0, 3000, T), r, 6e6)
    x_Thr = draw.normal(T, h, 2 * r)[..., r:]
    with poisoned():
        ours = kernels.apply_rope(x_Thr, table)
    assert_close(ours, twin.apply_rope(x_Thr, table), dtype, f"rope {T} {h} {r}")


def check_norms(kernels: ModuleType, device: str, dtype: torch.dtype, *, R: int, H: int) -> None:
    draw = Draw(device, dtype, R + H)
    x, delta, weight = draw.normal(R, H + 5)[:, :H], draw.normal(R, H), 1 + draw.normal(H, scale=0.2)
    with poisoned():
        ours, (our_sum, our_normed) = (
            kernels.rms_norm(x, weight, 1e-6),
            kernels.add_rms_norm(x, delta, weight, 1e-6),
        )
    their_sum, their_normed = twin.add_rms_norm(x, delta, weight, 1e-6)
    assert_close(ours, twin.rms_norm(x, weight, 1e-6), dtype, "rms_norm")
    assert torch.equal(our_sum, their_sum)
    assert_close(our_normed, their_normed, dtype, "add_rms_norm")


def check_swiglu(
    kernels: ModuleType, device: str, dtype: torch.dtype, *, R: int, F: int, limit: float | None
) -> None:
    gate, up = Draw(device, dtype, R + F).normal(R, 2 * F, scale=2.0).chunk(2, dim=-1)
    with poisoned():
        ours = kernels.swiglu(gate, up, limit)
    assert_close(ours, twin.swiglu(gate, up, limit), dtype, f"swiglu limit {limit}")


def check_route(
    kernels: ModuleType,
    device: str,
    dtype: torch.dtype,
    *,
    R: int,
    H: int,
    E: int,
    k: int,
    groups: int = 1,
    kept: int = 1,
    router_dtype: torch.dtype | None = None,
) -> None:
    """The same experts, but where scores differ by less than rounding, and the same weights for them."""
    draw = Draw(device, dtype, R + E)
    x, weight = draw.normal(R, H), draw.normal(E, H, scale=H**-0.5, dtype=router_dtype)
    bias = draw.normal(E, scale=0.1, dtype=torch.float32)
    with poisoned():
        ids, weights = kernels.route(x, weight, bias, groups, kept, k, 2.5)
    their_ids, their_weights = twin.route(x, weight, bias, groups, kept, k, 2.5)
    assert ids.dtype == their_ids.dtype and weights.dtype == their_weights.dtype
    agree = (ids == their_ids).all(-1)
    assert agree.double().mean() > 0.99 if R > 100 else agree.all()
    torch.testing.assert_close(weights[agree], their_weights[agree], rtol=1e-5, atol=1e-5)


def check_experts(
    kernels: ModuleType,
    device: str,
    dtype: torch.dtype,
    *,
    R: int,
    k: int,
    H: int,
    F: int,
    E: int,
    first: int = 0,
    n_local: int | None = None,
    width: tuple[int, int] | None = None,
    limit: float | None = None,
    shared_width: int | None = None,
    shared_limit: float | None = None,
    shared_channels: tuple[int, int] | None = None,
    with_residual: bool = False,
) -> None:
    """Experts of a rank that holds n_local of E from `first` on, and takes `width` of each."""
    n_local, width = n_local or E, width or (0, F)
    draw = Draw(device, dtype, R + H)
    ids = torch.stack([draw.permutation(E)[:k] for _ in range(R)])
    weights = draw.normal(R, k, dtype=torch.float32).abs() / k
    arguments = (
        draw.normal(R, H),
        ids,
        weights,
        draw.normal(n_local, 2 * F, H, scale=H**-0.5),
        draw.normal(n_local, H, F, scale=F**-0.5),
        first,
        width,
        limit,
        None if shared_width is None else twin.SharedExpert(
            draw.normal(2 * shared_width, H, scale=H**-0.5),
            draw.normal(H, shared_width, scale=shared_width**-0.5),
            shared_limit,
            shared_channels or (0, shared_width),
        ),
        draw.normal(R, H) if with_residual else None,
    )  # fmt: skip
    with poisoned():
        ours = kernels.experts(*arguments)
    with mock.patch.object(reference_experts, "_grouped", reference_experts._one_by_one):
        theirs = twin.experts(*arguments)
    assert_close(ours, theirs, dtype, f"experts of {R} rows")


def check_linear(
    linear: Callable[[Tensor, Tensor], Tensor], device: str, dtype: torch.dtype, *, R: int, H: int, N: int
) -> None:
    draw = Draw(device, dtype, R + N)
    x, weight = draw.normal(R, H + 8)[:, :H], draw.normal(N, H, scale=H**-0.5)
    with poisoned():
        ours = linear(x, weight)
    assert_close(ours, torch.nn.functional.linear(x, weight), dtype, f"linear {R} {H} {N}")
