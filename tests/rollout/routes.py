"""What the trainer's own routers choose, to compare records with.

Shapes: T tokens, L expert layers of the trunk, k experts per token, E experts.
"""

from __future__ import annotations

import numpy as np
import torch

from bailing_mtp.contracts.samples import Sample
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.model.router import GroupLimitedRouter
from bailing_mtp.parallel.context import ParallelContext
from tests.rollout.engine_rig import scored


def routers(module: torch.nn.Module) -> list[GroupLimitedRouter]:
    """In the order of the layers."""
    return [part for part in module.modules() if isinstance(part, GroupLimitedRouter)]


def random_routes(shape: tuple[int, ...], num_experts: int) -> torch.Tensor:
    """int16 [T, L, k]: distinct experts, without regard to groups."""
    noise = torch.rand((*shape[:-1], num_experts), generator=torch.Generator().manual_seed(7))
    return noise.argsort(-1)[..., : shape[-1]].to(torch.int16)


def trained_routes(built: BuiltModel, context: ParallelContext, sample: Sample) -> np.ndarray:
    """Expert ids [T, L, k], ascending, of one forward pass over prompt and response."""
    maps_TE: list[torch.Tensor] = []

    def keep(router: GroupLimitedRouter, args: tuple, out: tuple) -> None:
        maps_TE.append(out[1])

    hooks = [router.register_forward_hook(keep) for router in routers(built.trunk)]
    scored(BuiltModel(built.trunk, None), context, sample)
    for hook in hooks:
        hook.remove()
    ids = [routing.nonzero()[:, 1].view(len(routing), -1) for routing in maps_TE]
    return torch.stack(ids, 1).numpy()


def check_routes(built: BuiltModel, context: ParallelContext, sample: Sample) -> int:
    """AssertionError unless every recorded choice is the trainer's; returns the number of tokens without a record."""
    assert sample.routes is not None
    expected = trained_routes(built, context, sample)
    n_recorded, n_tokens = len(sample.routes), len(sample.prompt_ids) + len(sample.response_ids)
    assert len(expected) == n_tokens and n_tokens - 1 <= n_recorded <= n_tokens
    np.testing.assert_array_equal(np.sort(sample.routes, -1), expected[:n_recorded])
    return n_tokens - n_recorded
