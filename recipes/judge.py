"""Rewards of a rollout: every data-parallel replica scores a share in processes of its own, all ranks get all."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch.distributed as dist

from bailing_mtp.config import RlConfig, UserError
from bailing_mtp.contracts.samples import RolloutGroup
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rl.reward_pool import RewardPool, Rewards
from bailing_mtp.rl.samples import reward_samples

from .failure import fail_together


class Scores(NamedTuple):
    """`rewards`: per group, one for each usable sample, in order. `n_failed`: samples whose reward failed."""

    rewards: list[list[float]]
    n_failed: int


class Judge:
    """Made, used and ended by all ranks together."""

    def __init__(self, rl: RlConfig, context: ParallelContext, decode: Callable[[Sequence[int]], str]) -> None:
        """Raises UserError on all ranks where rl.reward cannot be loaded."""
        self._context, self._decode = context, decode
        self._pool: RewardPool | None = None
        error = None
        if context.tp_rank == 0:
            try:
                self._pool = RewardPool(rl.reward, rl.reward_workers, rl.reward_timeout_s, rl.reward_on_failure)
            except UserError as caught:
                error = caught
        fail_together(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.close()

    def score(self, groups: Sequence[RolloutGroup]) -> Scores:
        """Reward the usable samples of all groups. Raises UserError on all ranks where rewards cannot go on."""
        samples = [reward_samples(group, self._decode) for group in groups]
        flat = [sample for group in samples for sample in group]
        shares = self._shares(flat)
        joined = [0.0] * len(flat)
        for dp_rank, rewards in shares:
            joined[dp_rank :: self._context.dp] = rewards.values
        values = iter(joined)
        n_failed = sum(sum(rewards.failures.values()) for _, rewards in shares)
        return Scores([[next(values) for _ in group] for group in samples], n_failed)

    def _shares(self, flat: list[dict[str, Any]]) -> list[tuple[int, Rewards]]:
        """Data-parallel rank and rewards of each replica's share, on every rank."""
        context, mine, error = self._context, None, None
        if self._pool is not None:
            try:
                mine = context.dp_rank, self._pool.score(flat[context.dp_rank :: context.dp])
            except UserError as caught:
                error = caught
        fail_together(error)
        everyone: list[Any] = [None] * context.world_size
        dist.all_gather_object(everyone, mine)
        return [share for share in everyone if share is not None]
