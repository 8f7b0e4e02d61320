"""Prompts under way from one rollout of grpo to the next: over-sampled rollouts leave some of theirs unfinished."""

import base64
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from bailing_mtp.config import RlConfig
from bailing_mtp.contracts.samples import PartialGroup, RolloutGroup, Sample
from bailing_mtp.data.prompts import PromptLoader
from bailing_mtp.rollout.engine import RolloutEngine
from bailing_mtp.rollout.stats import RolloutStats

# Of a sample's values, those that its prompt tells.
_OF_THE_PROMPT = ("prompt_index", "prompt_ids")


class Backlog:
    """The prompts of a run, and what was carried over from its last rollout; the same on every rank.

    Its state depends on no layout of ranks: carried groups are dealt to the replicas anew by every rollout.
    """

    def __init__(self, prompts: PromptLoader, rl: RlConfig) -> None:
        self.prompts, self._rl = prompts, rl
        self._carried: list[PartialGroup] = []

    @property
    def n_under_way(self) -> int:
        """Prompts of one rollout, those included that it does not complete."""
        # Without the small term 10 * 1.1 would be 12.
        return math.ceil(self._rl.prompts_per_rollout * self._rl.oversample - 1e-6)

    def roll(self, engine: RolloutEngine, progress: Callable[[RolloutStats], None]) -> list[RolloutGroup]:
        """One rollout: rl.prompts_per_rollout complete groups. Collective.

        Carried groups go on before new prompts begin, the oldest first.
        """
        taken = {group.prompt.index for group in self._carried}
        drawn = self.prompts.draw(self.n_under_way - len(self._carried), taken)
        now = self.prompts.rollouts
        groups = [*self._carried, *(PartialGroup(prompt, now) for prompt in drawn)]
        found = engine.advance(groups, self._rl.prompts_per_rollout, self._due(now), progress)
        self._carried = found.carried
        return found.complete

    def _due(self, now: int) -> frozenset[int]:
        limit = self._rl.carry_limit
        if limit is None:
            return frozenset()
        return frozenset(group.prompt.index for group in self._carried if group.rollout_step + limit <= now)

    def metrics(self) -> dict[str, float]:
        """What is carried now; nothing where no rollout is over-sampled."""
        if self._rl.oversample == 1:
            return {}
        n_begun = sum(bool(sample.response_ids) for group in self._carried for sample in group.samples)
        return {"rollout/carried_samples": float(n_begun)}

    def state_dict(self) -> dict[str, Any]:
        """Place among the prompts and carried groups, as JSON values. Numbers come back as they were, bit for bit."""
        state = self.prompts.state_dict()
        return state | {"carried": [_plain(group) for group in self._carried]} if self._carried else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly after the rollout at which `state` was taken. UserError if it belongs to other prompts."""
        self.prompts.load_state_dict(state)
        self._carried = [self._group(values) for values in state.get("carried", ())]

    def _group(self, values: Mapping[str, Any]) -> PartialGroup:
        prompt = self.prompts.prompt(values["number"], values["index"])
        own = {"prompt_index": prompt.index, "prompt_ids": prompt.prompt_ids}
        samples = [
            Sample(**own, **{name: _back(value) for name, value in sample.items()}) for sample in values["samples"]
        ]
        return PartialGroup(prompt, values["rollout_step"], tuple(samples))


def _plain(group: PartialGroup) -> dict[str, Any]:
    names = [field.name for field in fields(Sample) if field.name not in _OF_THE_PROMPT]
    return {
        "number": group.prompt.number,
        "index": group.prompt.index,
        "rollout_step": group.rollout_step,
        "samples": [{name: _json(getattr(sample, name)) for name in names} for sample in group.samples],
    }


def _json(value: Any) -> Any:
    """A sample's value for JSON: arrays as text, the rest as it is."""
    if not isinstance(value, np.ndarray):
        return value
    text = base64.b64encode(value.tobytes()).decode("ascii")
    return {"dtype": value.dtype.name, "shape": list(value.shape), "base64": text}


def _back(value: Any) -> Any:
    if isinstance(value, dict):
        # Copied, because an array over bytes cannot be written to, and torch wants one that can.
        flat = np.frombuffer(base64.b64decode(value["base64"]), value["dtype"]).copy()
        return flat.reshape(value["shape"])
    return tuple(value) if isinstance(value, list) else value
