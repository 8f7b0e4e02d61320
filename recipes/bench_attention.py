"""Benchmark cases of both attentions of a decode step.

Shape legend: as kernels.reference.kda_verify and kernels.reference.mla_verify; R = n * S, heads h.
"""

import torch
from torch import Tensor

from bailing_mtp.kernels.reference import decode as twin

from .bench_case import TOLERANCE, Call, Case, Draw, Workload, worst_error

BLOCK_TOKENS = 64
KEPT_TOKENS = 2
"""Tokens of the last step that are replayed into the states, where that many were fed."""


def attention_cases(load: Workload, n: int, S: int) -> list[Case]:
    """All kernels of both mixers at one shape."""
    heads = load.arch.num_heads
    return [
        Case("kda_verify", n, S, lambda draw: _kda_verify(load, draw, n, S)),
        Case("mla_verify", n, S, lambda draw: _mla_verify(load, draw, n, S)),
        Case("write_latents", n, S, lambda draw: _write_latents(load, draw, n, S)),
        Case("apply_rope query", n, S, lambda draw: _apply_rope(load, draw, n * S, heads)),
        Case("apply_rope key", n, S, lambda draw: _apply_rope(load, draw, n * S, 1)),
    ]


def _kda_memory(load: Workload, draw: Draw, n: int, S: int) -> twin.KdaLayerMemory:
    arch, N, fp32 = load.arch, n + 1, torch.float32
    heads, d_k, d_v = arch.num_heads, arch.kda_head_dim, arch.v_head_dim
    channels = heads * (2 * d_k + d_v)
    return twin.KdaLayerMemory(
        draw.normal(N, heads, d_v, d_k, scale=0.1, dtype=fp32),
        draw.normal(2, N, arch.conv_kernel - 1 + S, channels),
        draw.uniform(2, N, S, heads, d_k),
        draw.normal(2, N, S, heads, d_k, scale=0.1, dtype=fp32),
        draw.normal(2, N, S, heads, d_v, scale=0.1, dtype=fp32),
    )


def _kda_verify(load: Workload, draw: Draw, n: int, S: int) -> Call:
    arch, kept, fp32 = load.arch, min(KEPT_TOKENS, S), torch.float32
    heads, d_k, d_v = arch.num_heads, arch.kda_head_dim, arch.v_head_dim
    memory = _kda_memory(load, draw, n, S)
    count_N = torch.full((n + 1,), kept, dtype=torch.int32, device=draw.device)
    inputs = (
        draw.normal(n * S, sum(arch.kda_in_rows)),
        draw.normal(heads * (2 * d_k + d_v), arch.conv_kernel, scale=0.5),
        draw.normal(heads, scale=0.5, dtype=fp32),
        draw.normal(heads, d_k, dtype=fp32),
        1 + draw.normal(d_v, scale=0.1),
    )
    settings = (count_N, torch.zeros_like(count_N), draw.permutation(n), S, arch.kda_lower_bound, arch.rms_norm_eps)

    def run() -> Tensor:
        return load.kernels.kda_verify(*inputs, memory, *settings)

    def error() -> float:
        theirs = twin.KdaLayerMemory(*(field.clone() for field in memory))
        their_o = twin.kda_verify(*inputs, theirs, *settings)
        return worst_error((run(), *memory), (their_o, *theirs))

    return Call(run, error, load.floors.kda_verify(n, S, kept), TOLERANCE[draw.dtype])


def _mla_verify(load: Workload, draw: Draw, n: int, S: int) -> Call:
    """Tables reach twice as far as the sequences do, as those of sequences under way."""
    arch, context = load.arch, load.context_tokens
    rank, width = arch.kv_lora_rank, arch.kv_lora_rank + arch.qk_rope_head_dim
    blocks = -(-2 * context // BLOCK_TOKENS)
    arguments = (
        draw.normal(n, S, arch.num_heads, width),
        draw.normal(n * blocks + 1, BLOCK_TOKENS, width),
        draw.permutation(n * blocks).view(n, blocks).to(torch.int32),
        torch.full((n,), context - S, device=draw.device),
        arch.qk_head_dim**-0.5,
        rank,
    )

    def error() -> float:
        return worst_error([load.kernels.mla_verify(*arguments)], [twin.mla_verify(*arguments)])

    floor_bytes = load.floors.mla_verify(n, S, context)
    return Call(lambda: load.kernels.mla_verify(*arguments), error, floor_bytes, TOLERANCE[draw.dtype])


def _write_latents(load: Workload, draw: Draw, n: int, S: int) -> Call:
    arch, context = load.arch, load.context_tokens
    width, blocks = arch.kv_lora_rank + arch.qk_rope_head_dim, -(-context // BLOCK_TOKENS)
    rows, latents = draw.normal(n * S, width), draw.normal(n * blocks + 1, BLOCK_TOKENS, width)
    table = draw.permutation(n * blocks).view(n, blocks).to(torch.int32).repeat_interleave(S, dim=0)
    position = torch.arange(context - S, context, device=draw.device).repeat(n)

    def run() -> None:
        load.kernels.write_latents(rows, latents, table, position)

    def error() -> float:
        theirs = latents.clone()
        twin.write_latents(rows, theirs, table, position)
        run()
        return worst_error([latents], [theirs])

    return Call(run, error, load.floors.write_latents(n * S), TOLERANCE[draw.dtype])


def _apply_rope(load: Workload, draw: Draw, R: int, heads: int) -> Call:
    """The rotary part of wider heads, as the projections leave it."""
    arch = load.arch
    r, before = arch.qk_rope_head_dim, arch.qk_nope_head_dim if heads > 1 else arch.kv_lora_rank
    x_Rhr = draw.normal(R, heads, before + r)[..., before:]
    table = twin.rope_table(draw.integers(load.context_tokens, R), r, arch.rope_theta)

    def run() -> Tensor:
        return load.kernels.apply_rope(x_Rhr, table)

    def error() -> float:
        return worst_error([run()], [twin.apply_rope(x_Rhr, table)])

    return Call(run, error, load.floors.apply_rope(R, heads), TOLERANCE[draw.dtype])
