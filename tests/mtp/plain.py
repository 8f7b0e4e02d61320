"""The MTP chain, its losses and its acceptance, written out site by site on whole logits.

Shapes: T tokens of the pack, n tokens of a document, H hidden size, V vocabulary, h heads, d query and key size,
v value size, F width of an expert. Source: Bailing V3 spec sections 2.2, 2.3, 3 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.model.mtp import MtpLayer


def documents(batch: TokenBatch) -> Iterator[range]:
    """Indices of each document that is not padding."""
    start = 0
    for n, is_padding in zip(batch.layout.lengths, batch.layout.is_padding, strict=True):
        if not is_padding:
            yield range(start, start + n)
        start += n


def valid_sites(batch: TokenBatch, depth: int) -> list[int]:
    """Sites whose target, token t+1+depth, is a trained token of the same document."""
    mask_T = batch.loss_mask_T if depth == 0 or batch.mtp_mask_T is None else batch.mtp_mask_T
    return [t for span in documents(batch) for t in span if t + 1 + depth < span.stop and mask_T[t + 1 + depth]]


def norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x_hr: Tensor, position: int, theta: float) -> Tensor:
    """Adjacent pairs turned by position * theta^(-2i/r), as complex numbers."""
    r = x_hr.shape[-1]
    angle = position * torch.pow(torch.tensor(theta), -torch.arange(0, r, 2) / r)
    turned = torch.view_as_complex(x_hr.reshape(-1, r // 2, 2).contiguous()) * torch.polar(torch.ones(r // 2), angle)
    return torch.view_as_real(turned).reshape(x_hr.shape)


@dataclass
class Row:
    """One token's key and value, [h, d] and [h, v]."""

    k: Tensor
    v: Tensor


class PlainMtp:
    """The MTP layer for one site at a time, over a cache of rows."""

    def __init__(self, mtp: MtpLayer, theta: float) -> None:
        self.w = dict(mtp.named_parameters())
        self.bias = mtp.block.mlp.router.expert_bias
        self.attention, self.config, self.theta = mtp.block.self_attention, mtp.config, theta

    def enter(self, embedding_H: Tensor, hidden_H: Tensor) -> Tensor:
        joined = torch.cat((norm(embedding_H, self.w["enorm.weight"]), norm(hidden_H, self.w["hnorm.weight"])))
        return self.w["eh_proj.weight"] @ joined

    def project(self, x_H: Tensor, position: int) -> tuple[Tensor, Row, Tensor]:
        """Query, the token's own row, and the head gates."""
        w, a = self.w, self.attention
        y = norm(x_H, w["block.input_layernorm.weight"])
        at = "block.self_attention."
        q = w[at + "q_b_proj.weight"] @ norm(w[at + "q_a_proj.weight"] @ y, w[at + "q_a_layernorm.weight"])
        q_n, q_r = q.view(a.heads, -1).split((a.nope_dim, a.rope_dim), -1)
        latent, k_r = (w[at + "kv_a_proj.weight"] @ y).split((a.kv_rank, a.rope_dim))
        kv = w[at + "kv_b_proj.weight"] @ norm(latent, w[at + "kv_a_layernorm.weight"])
        k_n, v = kv.view(a.heads, -1).split((a.nope_dim, a.value_dim), -1)
        k_r = rotate(k_r[None], position, self.theta).expand(a.heads, -1)
        q = torch.cat((q_n, rotate(q_r, position, self.theta)), -1)
        return q, Row(torch.cat((k_n, k_r), -1), v), (w[at + "gate_proj.weight"] @ y).sigmoid()

    def leave(self, x_H: Tensor, q_hd: Tensor, gate_h: Tensor, rows: list[Row]) -> Tensor:
        """Softmax over all rows, output projection, MoE, final norm."""
        keys, values = torch.stack([row.k for row in rows]), torch.stack([row.v for row in rows])
        weights = (torch.einsum("hd,lhd->hl", q_hd, keys) / math.sqrt(q_hd.shape[-1])).softmax(-1)
        o = torch.einsum("hl,lhv->hv", weights, values) * gate_h[:, None]
        x_H = x_H + self.w["block.self_attention.out_proj.weight"] @ o.flatten()
        x_H = x_H + self._moe(norm(x_H, self.w["block.pre_mlp_layernorm.weight"]))
        return norm(x_H, self.w["final_layernorm.weight"])

    def _moe(self, y_H: Tensor) -> Tensor:
        config, mlp = self.config, "block.mlp."
        scores = (self.w[mlp + "router.weight"] @ y_H).sigmoid()
        selection = (scores.detach() + self.bias).view(config.moe_router_num_groups, -1)
        best_two = selection.sort(descending=True).values[:, :2].sum(-1)
        groups = best_two.argsort(descending=True)[: config.moe_router_group_topk].tolist()
        size = selection.shape[1]
        allowed = [group * size + i for group in groups for i in range(size)]
        chosen = sorted(allowed, key=lambda e: -float(selection.flatten()[e]))[: config.moe_router_topk]
        weights = scores[chosen] / scores[chosen].sum() * config.moe_router_topk_scaling_factor
        out = self._swiglu(y_H, mlp + "shared_experts.gate_up.weight", mlp + "shared_experts.down.weight")
        for weight, e in zip(weights, chosen, strict=True):
            out = out + weight * self._swiglu(y_H, mlp + "experts.gate_up", mlp + "experts.down", e)
        return out

    def _swiglu(self, y_H: Tensor, gate_up: str, down: str, expert: int | None = None) -> Tensor:
        both, out = self.w[gate_up], self.w[down]
        if expert is not None:
            both, out = both[expert], out[expert]
        gate, up = (both @ y_H).chunk(2)
        return out @ (F.silu(gate) * up)


def chain_hidden(
    built: BuiltModel, batch: TokenBatch, hidden_TH: Tensor, depths: int
) -> list[dict[int, Tensor]]:
    """Per depth: site -> the layer's own output [H], each site drafting alone over the depth-1 rows up to it."""
    plain = PlainMtp(built.mtp, built.trunk.arch.rope_theta)
    table = built.trunk.embedding.weight
    found: list[dict[int, Tensor]] = [{} for _ in range(depths)]
    for span in documents(batch):
        cache: list[Row] = []
        for position, t in enumerate(span):
            previous, chain = hidden_TH[t], []
            for depth in range(1, depths + 1):
                if t + depth >= span.stop:
                    break
                x = plain.enter(table[batch.input_ids_T[t + depth]], previous)
                q, row, gate = plain.project(x, position + depth - 1)
                (cache if depth == 1 else chain).append(row)
                previous = plain.leave(x, q, gate, cache + chain)
                found[depth - 1][t] = previous
    return found


def site_losses(
    batch: TokenBatch, trunk_TV: Tensor, mtp_TV: list[Tensor], objective: str
) -> tuple[Tensor, list[Tensor]]:
    """Sum of the language model's loss and of each depth's, over their own valid sites."""
    ids = batch.input_ids_T.tolist()
    log_p_TV = trunk_TV.log_softmax(-1)
    lm = torch.stack([-log_p_TV[t, ids[t + 1]] for t in valid_sites(batch, 0)]).sum()
    sums = []
    for depth, q_TV in enumerate(mtp_TV, start=1):
        log_q_TV, total = q_TV.log_softmax(-1), q_TV.sum() * 0
        for t in valid_sites(batch, depth):
            if objective == "hard":
                total = total - log_q_TV[t, ids[t + 1 + depth]]
            else:
                total = total - (log_p_TV[t + depth].detach().exp() * log_q_TV[t]).sum()
        sums.append(total)
    return lm, sums


def acceptance(
    batch: TokenBatch, trunk_TV: Tensor, mtp_TV: list[Tensor], temperature: float
) -> list[tuple[float, float]]:
    """Per depth: (sum of reach * sum_x min(p, q), sum of reach) over valid sites."""
    ids, found = batch.input_ids_T.tolist(), []
    p_TV = (trunk_TV / temperature).softmax(-1)
    q_TV = [(x / temperature).softmax(-1) for x in mtp_TV]
    for depth in range(1, len(mtp_TV) + 1):
        accepted, reached = 0.0, 0.0
        for t in valid_sites(batch, depth):
            reach = 1.0
            for i in range(1, depth):
                x = ids[t + 1 + i]
                reach *= min(1.0, float(q_TV[i - 1][t, x] / p_TV[t + i, x]))
            accepted += reach * float(torch.minimum(p_TV[t + depth], q_TV[depth - 1][t]).sum())
            reached += reach
        found.append((accepted, reached))
    return found
