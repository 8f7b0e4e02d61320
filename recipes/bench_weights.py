"""One rank's shards of a model of random weights, made as decoding reads them, without a trainer or a checkpoint; and
random weights for a trainer's modules.

Every rank draws the same numbers, so that what is replicated is equal everywhere.

Shape legend: as weights.view.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from bailing_mtp.contracts.architecture import Architecture, LayerPlan
from bailing_mtp.contracts.clock import WeightsClock
from bailing_mtp.weights.view import (
    DenseWeights,
    KdaWeights,
    LayerWeights,
    MlaWeights,
    MoeWeights,
    MtpWeights,
    WeightsView,
)

from .bench_case import Draw

SKEW = 0.5
"""Spread of the bias by which experts are chosen where routing is skewed; a router's scores spread over 0.2."""


def random_view(arch: Architecture, draw: Draw, tp: int = 1, ep: int = 1, is_skewed: bool = False) -> WeightsView:
    """The model, with its MTP layer if the architecture has one; products keep the size of their inputs."""
    maker = _Maker(arch, draw, tp, ep, is_skewed)
    embedding_vH = draw.normal(arch.vocab_size // tp, arch.hidden_size)
    return WeightsView(
        arch=arch,
        embedding_vH=embedding_vH,
        layers=tuple(maker.layer(plan) for plan in arch.trunk_plan()),
        final_norm_H=maker.ones(arch.hidden_size),
        head_vH=embedding_vH if arch.tie_embeddings else maker.matrix(arch.vocab_size // tp, arch.hidden_size),
        mtp=maker.mtp() if arch.num_mtp_layers else None,
        version=0,
        clock=WeightsClock(),
    )


def fill_random(modules: Iterable[nn.Module], generator: torch.Generator) -> None:
    """Give a trainer's modules random weights on their device."""
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.data.fill_(0.0 if name.endswith(("A_log", "dt_bias")) else 1.0)


class _Maker:
    def __init__(self, arch: Architecture, draw: Draw, tp: int, ep: int, is_skewed: bool) -> None:
        self.arch, self.draw, self.tp, self.ep, self.is_skewed = arch, draw, tp, ep, is_skewed

    def matrix(self, *shape: int) -> Tensor:
        return self.draw.normal(*shape, scale=shape[-1] ** -0.5)

    def ones(self, *shape: int) -> Tensor:
        return torch.ones(*shape, dtype=self.draw.dtype, device=self.draw.device)

    def zeros(self, *shape: int) -> Tensor:
        """fp32, as A_log, dt_bias and the experts' bias always are."""
        return torch.zeros(*shape, device=self.draw.device)

    def layer(self, plan: LayerPlan) -> LayerWeights:
        H = self.arch.hidden_size
        mixer = self.kda() if plan.mixer == "kda" else self.mla()
        if plan.mlp == "dense":
            mlp = self.dense(self.arch.intermediate_size, plan.swiglu_limit)
        else:
            mlp = self.moe(plan)
        return LayerWeights(plan, self.ones(H), self.ones(H), mixer, mlp)

    def kda(self) -> KdaWeights:
        arch, heads = self.arch, self.arch.num_heads // self.tp
        d_k, d_v = arch.kda_head_dim, arch.v_head_dim
        return KdaWeights(
            in_proj_YH=self.matrix(sum(arch.kda_in_rows) // self.tp, arch.hidden_size),
            conv_XW=self.matrix(heads * (2 * d_k + d_v), arch.conv_kernel),
            A_log_h=self.zeros(heads),
            dt_bias_hD=self.zeros(heads, d_k),
            o_norm_V=self.ones(d_v),
            out_proj_HhV=self.matrix(arch.hidden_size, heads * d_v),
        )

    def mla(self) -> MlaWeights:
        arch, H, heads = self.arch, self.arch.hidden_size, self.arch.num_heads // self.tp
        q_rank, rank = arch.q_lora_rank, arch.kv_lora_rank
        return MlaWeights(
            q_a_QH=None if q_rank is None else self.matrix(q_rank, H),
            q_a_norm_Q=None if q_rank is None else self.ones(q_rank),
            q_b=self.matrix(heads * arch.qk_head_dim, H if q_rank is None else q_rank),
            kv_a_rows_H=self.matrix(rank + arch.qk_rope_head_dim, H),
            kv_a_norm_C=self.ones(rank),
            kv_b_hxC=self.matrix(heads, arch.qk_nope_head_dim + arch.v_head_dim, rank),
            gate_hH=self.matrix(heads, H),
            out_proj_HhV=self.matrix(H, heads * arch.v_head_dim),
        )

    def dense(self, width: int, limit: float | None) -> DenseWeights:
        H, width = self.arch.hidden_size, width // self.tp
        return DenseWeights(self.matrix(2 * width, H), self.matrix(H, width), limit)

    def moe(self, plan: LayerPlan) -> MoeWeights:
        arch, H, E = self.arch, self.arch.hidden_size, self.arch.num_experts
        width, shared, e = arch.moe_intermediate_size, arch.shared_intermediate_size, E // self.ep
        return MoeWeights(
            router_EH=self.matrix(E, H),
            expert_bias_E=self.draw.uniform(E) * (SKEW if self.is_skewed else 0.0),
            gate_up_e2FH=self.matrix(e, 2 * width, H),
            down_eHF=self.matrix(e, H, width),
            limit=plan.swiglu_limit,
            shared=None if shared is None else self.dense(shared, plan.shared_swiglu_limit),
        )

    def mtp(self) -> MtpWeights:
        H = self.arch.hidden_size
        layer = self.layer(self.arch.mtp_plan())
        return MtpWeights(self.ones(H), self.ones(H), self.matrix(H, 2 * H), layer, self.ones(H))
