"""Model FLOPs of training: what the mathematics needs, whatever is recomputed, padded, replicated or left in.

A multiply-add is 2 FLOPs. Per token, forward:

    2 * (weights of every matrix that the token meets)
        KDA: in_proj, conv taps, out_proj. MLA: q_a, q_b (or q_proj), kv_a, kv_b, gate, out_proj.
        Dense MLP: 3 H F. MoE: router E H, top-k routed experts and the shared expert, 3 H F each.
        The embedding is a look-up, norms and activations are not counted.
    KDA recurrence in chunks of C = 64 tokens, per head (d key size, v value size):
        6 d v                the chunk's state read twice (for u and for the output) and updated once
      + C (3 d + 2 v)        lower triangles of K K^T, Q K^T and T K; of T V and (Q K^T) U
      + C^2 / 3              T, the inverse of the unit lower triangle

Per site with a target, forward: the output head, V H. Of MTP depth d also the layer's block but for keys and values,
and d - 1 chain keys. Its keys and values (2 H H for eh_proj, kv_a, kv_b) are made once for every token that a depth-1
query sees, and at depth d > 1 for every site with a target.

Per causal pair (a site and a key that it sees, itself included) of an MLA layer, forward: 2 heads (qk + v).
A document of n tokens has n (n + 1) / 2 pairs; of the MTP layer only queries with a target count.

Backward is twice the forward (gradients of inputs and of weights). A detached MTP loss does not compute the
head's weight gradient, so the head counts 2 instead of 3 times there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from bailing_mtp.contracts.architecture import Architecture, LayerPlan
from bailing_mtp.contracts.batch import TokenBatch

KDA_CHUNK_TOKENS = 64
"""Of fla's kernels."""
TRAIN_PASSES = 3
"""Forward, and a backward of twice its cost."""
DETACHED_HEAD_PASSES = 2

PEAK_BF16_FLOPS_PER_S = {"H100": 989e12, "H200": 989e12}
"""Dense bf16 matrix FLOPs per second by a word of the device's name (SXM, NVIDIA data sheets)."""


@dataclass(frozen=True)
class TrainingFlops:
    """Forward and backward FLOPs."""

    per_token: float
    per_pair: float
    per_site: tuple[float, ...]
    """Of a site with a target, depth by depth; depth 0 is the trunk's head."""
    per_key: float
    """Of a token that depth-1 queries of the MTP layer see."""
    per_mtp_pair: float

    def of(self, microbatches: Iterable[TokenBatch]) -> float:
        """FLOPs of these packs, which lie in host memory; padding is left out."""
        return sum(self._of_pack(batch) for batch in microbatches)

    def _of_pack(self, batch: TokenBatch) -> float:
        documents = zip(batch.layout.lengths, batch.layout.is_padding, strict=True)
        lengths = [length for length, is_padding in documents if not is_padding]
        n_pairs = sum(length * (length + 1) // 2 for length in lengths)
        flops, deepest = self.per_token * sum(lengths) + self.per_pair * n_pairs, len(self.per_site) - 1
        valid = [batch.shift(depth).valid_T for depth in range(deepest + 1)]
        seen_T = batch.layout.position_ids_T + 1
        for depth, (each, valid_T) in enumerate(zip(self.per_site, valid, strict=True)):
            flops += each * int(valid_T.sum()) + (self.per_mtp_pair * int(seen_T[valid_T].sum()) if depth else 0.0)
        if deepest:
            asks_T = torch.stack(valid[1:]).any(0)
            document_T = torch.searchsorted(batch.layout.cu_seqlens, torch.arange(len(asks_T)), right=True) - 1
            keys_N = torch.zeros(len(batch.layout.lengths), dtype=torch.int64)
            flops += self.per_key * int(keys_N.scatter_reduce_(0, document_T, seen_T * asks_T, "amax").sum())
        return flops


def training_flops(arch: Architecture, mtp_depth: int = 0, mtp_detached: bool = False) -> TrainingFlops:
    """FLOPs of a model trained with `mtp_depth` depths of its MTP loss (0 = off); formula in the module's text."""
    head, plans = 2 * arch.vocab_size * arch.hidden_size, arch.trunk_plan()
    per_site, keys = [TRAIN_PASSES * head], 0
    if mtp_depth:
        keys = 2 * (2 * arch.hidden_size**2 + _mla_key_weights(arch))
        asking = _layer(arch, arch.mtp_plan()) - 2 * _mla_key_weights(arch)
        head_passes = DETACHED_HEAD_PASSES if mtp_detached else TRAIN_PASSES
        for depth in range(1, mtp_depth + 1):
            rows = asking + (depth - 1) * _pair(arch) + (keys if depth > 1 else 0)
            per_site.append(TRAIN_PASSES * rows + head_passes * head)
    return TrainingFlops(
        per_token=TRAIN_PASSES * sum(_layer(arch, plan) for plan in plans),
        per_pair=TRAIN_PASSES * sum(plan.mixer == "mla" for plan in plans) * _pair(arch),
        per_site=tuple(per_site),
        per_key=TRAIN_PASSES * keys,
        per_mtp_pair=TRAIN_PASSES * _pair(arch),
    )


def peak_flops_per_s(device_name: str) -> float | None:
    """Dense bf16 peak of a GPU by its name, None where it is not known."""
    return next((peak for word, peak in PEAK_BF16_FLOPS_PER_S.items() if word in device_name), None)


def _layer(arch: Architecture, plan: LayerPlan) -> float:
    """Forward FLOPs per token of one layer, attention scores left out."""
    mixer = _kda(arch) if plan.mixer == "kda" else 2 * _mla_weights(arch)
    return mixer + 2 * (_moe_weights(arch) if plan.mlp == "moe" else 3 * arch.hidden_size * arch.intermediate_size)


def _kda(arch: Architecture) -> float:
    n_heads, d_k, d_v, chunk = arch.num_heads, arch.kda_head_dim, arch.v_head_dim, KDA_CHUNK_TOKENS
    channels = sum(arch.kda_in_rows[:3])
    weights = arch.hidden_size * (sum(arch.kda_in_rows) + n_heads * d_v) + channels * arch.conv_kernel
    recurrence = 6 * d_k * d_v + chunk * (3 * d_k + 2 * d_v) + chunk**2 / 3
    return 2 * weights + n_heads * recurrence


def _mla_weights(arch: Architecture) -> int:
    hidden, n_heads, rank = arch.hidden_size, arch.num_heads, arch.q_lora_rank
    q_rows = n_heads * arch.qk_head_dim
    q = hidden * q_rows if rank is None else rank * (hidden + q_rows)
    return q + _mla_key_weights(arch) + hidden * n_heads + n_heads * arch.v_head_dim * hidden


def _mla_key_weights(arch: Architecture) -> int:
    down = arch.hidden_size * (arch.kv_lora_rank + arch.qk_rope_head_dim)
    return down + arch.kv_lora_rank * arch.num_heads * (arch.qk_nope_head_dim + arch.v_head_dim)


def _moe_weights(arch: Architecture) -> int:
    """Weights that one token meets: the router, its experts, the shared expert."""
    width = arch.experts_per_token * arch.moe_intermediate_size + (arch.shared_intermediate_size or 0)
    return arch.hidden_size * (arch.num_experts + 3 * width)


def _pair(arch: Architecture) -> int:
    return 2 * arch.num_heads * (arch.qk_head_dim + arch.v_head_dim)
