"""Grouped experts split over ranks, without a dispatcher: what one process computes, twice the same bits.

Shapes: T tokens, K experts per token, R rows received, H hidden size.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from bailing_mtp.kernels.reference import train as twin
from bailing_mtp.model.exchange import OpeningExchange, return_sums, send_tokens
from bailing_mtp.model.mlp import swiglu
from bailing_mtp.model.moe import GroupedMoeLayer, _Experts
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.activations import PassSizes, moe_block
from tests.distributed import worlds
from tests.kernels.decode_cases import Draw
from tests.mtp import models
from tests.training.saved import saved_bytes

RECOMPUTES = ("none", "selective", "full")
K, N_LOCAL, H, WIDTH = 3, 4, 16, 8


def grouped(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """Gradients of a step and router counts of two joint MTP depths, in every recompute mode."""
    for recompute in RECOMPUTES:
        settings = dataclasses.replace(worlds.GROUPED, recompute=recompute)
        with worlds.layout(tp, ep) as context:
            runs = [_gradients(reference, context, settings) for _ in range(2)]
            assert all(torch.equal(runs[1][name], grad) for name, grad in runs[0].items()), recompute


def _gradients(reference: worlds.Reference, context: ParallelContext, settings: ModelSettings) -> dict[str, Tensor]:
    """This rank's, after a check against those of one process."""
    built = worlds.fixture_model("moe", context, settings)
    layers = [module for part in built.modules for module in part.modules() if isinstance(module, GroupedMoeLayer)]
    assert len(layers) > 1
    return models.main_grads(worlds.chain_state(reference, built, context))


def exchanged(
    reference: worlds.Reference,
    scratch: Path,
    kernels: ModuleType = twin,
    dtype: torch.dtype = torch.float32,
    limit: float | None = 0.3,
    tolerance: float = 1e-5,
) -> None:
    """Ranks with different numbers of tokens, one with none; a rank that nothing goes to; experts without tokens.

    Rounded to 16 bits some values pass a limit that they did not pass before: `limit` is then None.
    """
    world, rank, device = dist.get_world_size(), dist.get_rank(), _device()
    n_experts = world * N_LOCAL
    held = slice(rank * N_LOCAL, (rank + 1) * N_LOCAL)
    everywhere, first_rank, last_experts = range(n_experts), range(N_LOCAL), range(n_experts - K, n_experts)
    for sizes, experts in (
        ((0, 7, 12, 5), everywhere),
        ((9, 0, 1, 4), first_rank),
        ((2, 6, 0, 3), last_experts),
        ((0, 0, 0, 0), everywhere),
    ):
        total, mine = sum(sizes[:world]), slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        draw = Draw(device, dtype, seed=1)
        ids_TK = torch.tensor(experts, device=device)[
            torch.stack([draw.permutation(len(experts))[:K] for _ in range(total + 1)])[:total]
        ]
        x_TH, upstream_TH = draw.normal(total, H), draw.normal(total, H)
        weights_TK = draw.normal(total, K, dtype=torch.float32)
        whole = (x_TH, weights_TK, draw.normal(n_experts, 2 * WIDTH, H), draw.normal(n_experts, H, WIDTH))
        parts = (mine, mine, held, held)
        local = [x[part] for x, part in zip(whole, parts, strict=True)]
        expected = _alone(ids_TK, [x.float() for x in whole], upstream_TH.float(), limit)
        for keeps_inputs in (True, False):
            runs = [_split(kernels, limit, keeps_inputs, ids_TK[mine], local, upstream_TH[mine]) for _ in range(2)]
            for found, again, theirs, part in zip(*runs, expected, (mine, *parts), strict=True):
                assert torch.equal(found, again)
                error = float((found - theirs[part]).norm())
                assert error <= tolerance * float(theirs[part].norm()), (sizes, tuple(found.shape), error)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _alone(ids_TK: Tensor, inputs: list[Tensor], upstream_TH: Tensor, limit: float | None) -> list[Tensor]:
    """Output and gradients, all tokens and experts at one place, one choice after the other."""
    x_TH, weights_TK, gate_up, down = leaves = [x.clone().requires_grad_() for x in inputs]
    out_TH = 0 * x_TH
    for choice in range(K):
        hidden = torch.einsum("tfh,th->tf", gate_up[ids_TK[:, choice]], x_TH)
        act = swiglu(hidden, limit)
        out_TH = out_TH + weights_TK[:, choice, None] * torch.einsum("thf,tf->th", down[ids_TK[:, choice]], act)
    return [out_TH.detach(), *torch.autograd.grad(out_TH, leaves, upstream_TH)]


def _split(
    kernels: ModuleType,
    limit: float | None,
    keeps_inputs: bool,
    ids_TK: Tensor,
    inputs: list[Tensor],
    upstream_TH: Tensor,
) -> list[Tensor]:
    """The same of this rank's tokens and experts."""
    x_TH, weights_TK, gate_up, down = leaves = [x.clone().requires_grad_() for x in inputs]
    exchange = OpeningExchange(ids_TK, N_LOCAL, dist.group.WORLD, kernels).wait()
    ids_RK, x_RH, weights_RK = send_tokens(exchange, ids_TK, N_LOCAL, x_TH, weights_TK)
    out_RH = _Experts.apply(
        kernels, limit, keeps_inputs, exchange.n_choices, ids_RK, x_RH, weights_RK, gate_up, down
    )
    out_TH = return_sums(exchange, out_RH)
    return [out_TH.detach(), *torch.autograd.grad(out_TH, leaves, upstream_TH)]


def a_row_for_each_rank(reference: worlds.Reference, scratch: Path) -> None:
    """A token whose experts share a rank goes there once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ids_TK = torch.tensor([[0, 1, N_LOCAL], [N_LOCAL - 1, 0, 1]], device=_device())
    exchange = OpeningExchange(ids_TK, N_LOCAL, dist.group.WORLD, twin).wait()
    assert exchange.n_sent == [2, 1] + [0] * (world - 2)
    assert exchange.n_received == ([2], [1], [0], [0])[rank] * world and exchange.token_S.tolist() == [0, 1, 0]
    assert exchange.n_choices == (5, 1, 0, 0)[rank] * world


def kept_bytes(reference: worlds.Reference, scratch: Path) -> None:
    """What the layer keeps where every token goes to both ranks, against the memory plan; mean of the ranks."""
    with worlds.layout(tp=1, ep=2) as context:
        for recompute in ("none", "selective"):
            settings = dataclasses.replace(worlds.GROUPED, recompute=recompute)
            built = worlds.fixture_model("moe", context, settings)
            arch, layer = built.trunk.arch, built.trunk.decoder.layers[-1].mlp
            assert arch.num_groups == 4 and arch.groups_per_token == 2
            # Experts of the first and of the last group alone.
            layer.router.expert_bias.fill_(-100.0).view(4, -1)[[0, 3]] = 100.0
            x = torch.randn(300, 1, arch.hidden_size).requires_grad_()
            found = torch.tensor(float(saved_bytes((layer,), lambda x=x, layer=layer: layer(x)) - x.nbytes))
            dist.all_reduce(found)
            planned = moe_block(PassSizes(arch, settings, 300, ep=2), arch.trunk_plan()[-1]).kept
            assert abs(found.item() / 2 / planned - 1) < 0.02, (recompute, found.item() / 2, planned)

