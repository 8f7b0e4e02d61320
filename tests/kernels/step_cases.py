"""Comparisons, as those of decode_cases, of the kernels around the mixers and of joined projections."""

from __future__ import annotations

from types import ModuleType

import torch

from bailing_mtp.kernels.reference import decode as twin
from tests.kernels.decode_cases import Draw, assert_close, poisoned


def check_linears(
    kernels: ModuleType, device: str, dtype: torch.dtype, *, R: int, H: int, sizes: tuple[int, ...]
) -> None:
    draw = Draw(device, dtype, R + H)
    x = draw.normal(R, H + 8)[:, :H]
    weights = tuple(draw.normal(N, H, scale=H**-0.5) for N in sizes)
    with poisoned():
        ours = kernels.linears(x, weights)
    for number, (our, their) in enumerate(zip(ours, twin.linears(x, weights), strict=True)):
        assert_close(our, their, dtype, f"projection {number} of {R} rows")


def check_embed(kernels: ModuleType, device: str, dtype: torch.dtype, *, R: int, v: int, H: int) -> None:
    """Ids of this rank's rows, of others', and outside the vocabulary."""
    draw = Draw(device, dtype, R + H)
    ids, embedding = draw.integers(-3, 3 * v, R), draw.normal(v, H)
    ids[:2] = torch.tensor([v, 2 * v - 1])
    with poisoned():
        ours = kernels.embed(ids, embedding, v)
    assert torch.equal(ours, twin.embed(ids, embedding, v)) and ours.any(1).tolist() == (ids // v == 1).tolist()


def check_norm_pair(kernels: ModuleType, device: str, dtype: torch.dtype, *, R: int, H: int) -> None:
    draw = Draw(device, dtype, R + H)
    left, right = draw.normal(R, H), draw.normal(R, 2 * H)[:, :H]
    weights = [1 + draw.normal(H, scale=0.2) for _ in range(2)]
    with poisoned():
        ours = kernels.norm_pair(left, weights[0], right, weights[1], 1e-6)
    assert_close(ours, twin.norm_pair(left, weights[0], right, weights[1], 1e-6), dtype, "norm_pair")


def check_step_rows(kernels: ModuleType, device: str, *, slots: int, n: int, blocks: int) -> None:
    """A table that is part of a wider one; the last slot stands before its first position."""
    draw = Draw(device, torch.float32, slots)
    position = draw.integers(0, 5000, slots).to(torch.int32)
    position[-1] = 0
    table = draw.integers(0, 999, slots, blocks + 3).to(torch.int32)[:, :blocks]
    slots_n = torch.cat([draw.permutation(slots - 1)[: n - 1], torch.tensor([slots - 1], device=device)])
    for offset in (0, 2, -1):
        with poisoned():
            ours = kernels.step_rows(position, table, slots_n, offset)
        for our, their in zip(ours, twin.step_rows(position, table, slots_n, offset), strict=True):
            assert our.dtype == their.dtype and torch.equal(our, their)


def check_mla_step(
    kernels: ModuleType,
    device: str,
    dtype: torch.dtype,
    *,
    n: int,
    S: int,
    h: int,
    k: int,
    v: int,
    C: int,
    r: int,
    Q: int,
    block_tokens: int,
    max_blocks: int,
) -> None:
    """The launches before and after the attention; some rows stand past their tables."""
    draw, R, context = Draw(device, dtype, n * S + C), n * S, block_tokens * max_blocks
    table = draw.permutation(n * max_blocks).view(n, max_blocks).to(torch.int32)
    position = draw.integers(0, context - S + 1, n)
    position[1::5] = context - 1
    rope = twin.rope_table(torch.arange(context, device=device), r, 6e6)
    kv, q, gate = draw.normal(R, C + r + Q + h).split((C + r, Q, h), dim=1)
    norms = [1 + draw.normal(size, scale=0.2) for size in (C, Q)]
    for with_query in (True, False):
        ours, theirs = (draw.nans(n * max_blocks + 1, block_tokens, C + r) for _ in range(2))
        inputs = (kv, norms[0], q if with_query else None, norms[1] if with_query else None, 1e-6, rope)
        with poisoned():
            our_q = kernels.cache_latents(*inputs, ours, table, position)
        their_q = twin.cache_latents(*inputs, theirs, table, position)
        assert_close(ours[:-1], theirs[:-1], dtype, "cache")
        # Several tokens may meet in the scratch block: it holds one of them.
        assert torch.equal(ours[-1].isnan(), theirs[-1].isnan())
        if with_query:
            assert_close(our_q, their_q, dtype, "latents of queries")
        else:
            assert our_q is None and their_q is None

    kv_b = draw.normal(h, k + v, C, scale=k**-0.5)
    key_up, value_up = kv_b.split((k, v), dim=1)
    q_Rhd, o = draw.normal(R, h, k + r), draw.normal(n, S, h, C)
    with poisoned():
        ours_x = kernels.absorb_queries(q_Rhd, key_up, rope, position)
        ours_v = kernels.gated_values(o, value_up, gate)
    assert_close(ours_x, twin.absorb_queries(q_Rhd, key_up, rope, position), dtype, "queries")
    assert_close(ours_v, twin.gated_values(o, value_up, gate), dtype, "values")
