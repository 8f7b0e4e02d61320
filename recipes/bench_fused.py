"""Benchmark cases of what stands around the mixers of a decode step: joined projections, and small launches.

Shape legend: as kernels.reference.mla_step and kernels.reference.rows.
"""

import torch
from torch import Tensor

from bailing_mtp.kernels.reference import decode as twin

from .bench_attention import BLOCK_TOKENS
from .bench_case import TOLERANCE, Call, Case, Draw, Workload, worst_error


def fused_cases(load: Workload, n: int, S: int) -> list[Case]:
    """All of them at one shape."""
    return [
        Case("linears mla in", n, S, lambda draw: _linears(load, draw, n * S)),
        Case("cache_latents", n, S, lambda draw: _cache_latents(load, draw, n, S)),
        Case("absorb_queries", n, S, lambda draw: _absorb_queries(load, draw, n, S)),
        Case("gated_values", n, S, lambda draw: _gated_values(load, draw, n, S)),
        Case("embed", n, S, lambda draw: _embed(load, draw, n * S)),
        Case("norm_pair", n, S, lambda draw: _norm_pair(load, draw, n * S)),
    ]


def _call(load: Workload, draw: Draw, name: str, arguments: tuple[object, ...], floor_bytes: int) -> Call:
    """A kernel without side effects, by its name in both sets."""

    def run() -> object:
        return getattr(load.kernels, name)(*arguments)

    def error() -> float:
        results = (run(), getattr(twin, name)(*arguments))
        return worst_error(*(x if isinstance(x, tuple) else [x] for x in results))

    return Call(run, error, floor_bytes, TOLERANCE[draw.dtype])


def _linears(load: Workload, draw: Draw, R: int) -> Call:
    """Latent, gate and query projections of one layer, as many as the architecture has."""
    arch, H = load.arch, load.arch.hidden_size
    outputs = [arch.kv_lora_rank + arch.qk_rope_head_dim, arch.num_heads]
    outputs += [] if arch.q_lora_rank is None else [arch.q_lora_rank]
    weights = tuple(draw.normal(N, H, scale=H**-0.5) for N in outputs)
    return _call(load, draw, "linears", (draw.normal(R, H), weights), load.floors.linear(R, H, sum(outputs)))


def _rope(load: Workload, draw: Draw) -> Tensor:
    positions = torch.arange(2 * load.context_tokens, device=draw.device)
    return twin.rope_table(positions, load.arch.qk_rope_head_dim, load.arch.rope_theta)


def _cache_latents(load: Workload, draw: Draw, n: int, S: int) -> Call:
    arch, context = load.arch, load.context_tokens
    C, blocks = arch.kv_lora_rank, -(-context // BLOCK_TOKENS)
    width, Q = C + arch.qk_rope_head_dim, arch.q_lora_rank
    both_R = draw.normal(n * S, width + (Q or 0))
    inputs = (
        both_R[:, :width],
        1 + draw.normal(C, scale=0.1),
        None if Q is None else both_R[:, width:],
        None if Q is None else 1 + draw.normal(Q, scale=0.1),
        1e-6,
        _rope(load, draw),
    )
    latents = draw.normal(n * blocks + 1, BLOCK_TOKENS, width)
    table = draw.permutation(n * blocks).view(n, blocks).to(torch.int32)
    position = torch.full((n,), context - S, device=draw.device)

    def run() -> Tensor | None:
        return load.kernels.cache_latents(*inputs, latents, table, position)

    def error() -> float:
        theirs = latents.clone()
        their_q, our_q = twin.cache_latents(*inputs, theirs, table, position), run()
        return worst_error([latents, *([] if Q is None else [our_q])], [theirs, *([] if Q is None else [their_q])])

    return Call(run, error, load.floors.cache_latents(n * S), TOLERANCE[draw.dtype])


def _absorb_queries(load: Workload, draw: Draw, n: int, S: int) -> Call:
    arch, heads, k, C = load.arch, load.arch.num_heads, load.arch.qk_nope_head_dim, load.arch.kv_lora_rank
    key_up = draw.normal(heads, k + arch.v_head_dim, C, scale=k**-0.5)[:, :k]
    position = torch.full((n,), load.context_tokens - S, device=draw.device)
    arguments = (draw.normal(n * S, heads, arch.qk_head_dim), key_up, _rope(load, draw), position)
    return _call(load, draw, "absorb_queries", arguments, load.floors.absorb_queries(n * S))


def _gated_values(load: Workload, draw: Draw, n: int, S: int) -> Call:
    arch, heads, k, C = load.arch, load.arch.num_heads, load.arch.qk_nope_head_dim, load.arch.kv_lora_rank
    value_up = draw.normal(heads, k + arch.v_head_dim, C, scale=C**-0.5)[:, k:]
    arguments = (draw.normal(n, S, heads, C), value_up, draw.normal(n * S, heads))
    return _call(load, draw, "gated_values", arguments, load.floors.gated_values(n * S))


def _embed(load: Workload, draw: Draw, R: int) -> Call:
    v, H = load.arch.vocab_size, load.arch.hidden_size
    arguments = (draw.integers(v, R), draw.normal(v, H), 0)
    return _call(load, draw, "embed", arguments, load.floors.embed(R))


def _norm_pair(load: Workload, draw: Draw, R: int) -> Call:
    H = load.arch.hidden_size
    arguments = (draw.normal(R, H), draw.normal(H), draw.normal(R, H), draw.normal(H), load.arch.rms_norm_eps)
    return _call(load, draw, "norm_pair", arguments, load.floors.norm_pair(R))
