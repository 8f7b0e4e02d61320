"""Which groups of a rollout are complete, and what the rest of them goes on with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bailing_mtp.contracts.samples import PartialGroup, RolloutGroup, Sample


class Advanced(NamedTuple):
    """What a rollout made of its groups; both in their order."""

    complete: list[RolloutGroup]
    carried: list[PartialGroup]
    """Those that go on in the next rollout, and complete ones beyond `enough`."""


@dataclass
class Tally:
    """Samples of one replica's share of groups, as they end."""

    groups: Sequence[PartialGroup]
    required: frozenset[int] = frozenset()
    """Prompts, by index, that a rollout does not end without."""
    on_sample: Callable[[Sample], None] | None = None
    ended: list[tuple[Sample, int]] = field(default_factory=list)
    """Each with the decode step after which it had ended."""

    def __post_init__(self) -> None:
        self._missing = {group.prompt.index: len(group.unfinished) for group in self.groups}

    def add(self, samples: Iterable[Sample], step: int) -> None:
        for sample in samples:
            self.ended.append((sample, step))
            self._missing[sample.prompt_index] -= 1
            if self.on_sample is not None:
                self.on_sample(sample)

    @property
    def n_complete(self) -> int:
        return sum(missing == 0 for missing in self._missing.values())

    @property
    def n_required_open(self) -> int:
        return sum(self._missing[index] > 0 for index in self.required & self._missing.keys())


def part(
    groups: Sequence[PartialGroup],
    ended: Iterable[tuple[Sample, int]],
    unfinished: Iterable[Sample],
    enough: int,
    required: frozenset[int],
) -> Advanced:
    """Part all groups of a rollout, with what all replicas have of them, into the first `enough` complete ones and
    the rest.

    First are the required ones, then those whose last sample ended first (in steps, the older group before the
    younger): a rule over what every rank knows, so that all ranks part alike.
    """
    samples = {
        (group.prompt.index, s.sample_index): s
        for group in groups
        for s in group.samples
        if s.finish_reason != "unfinished"
    }
    last_step = dict.fromkeys((group.prompt.index for group in groups), 0)
    for sample, step in ended:
        samples[sample.prompt_index, sample.sample_index] = sample
        last_step[sample.prompt_index] = max(last_step[sample.prompt_index], step)
    samples |= {(sample.prompt_index, sample.sample_index): sample for sample in unfinished}
    now = []
    for group in groups:
        keys = [(group.prompt.index, i) for i in range(group.prompt.samples_per_prompt)]
        now.append(replace(group, samples=tuple(samples[key] for key in keys if key in samples)))
    complete = [place for place, group in enumerate(now) if group.is_complete]

    def age(place: int) -> tuple[bool, int, int]:
        index = now[place].prompt.index
        return (index not in required, last_step[index], place)

    chosen = set(sorted(complete, key=age)[:enough])
    return Advanced(
        [RolloutGroup(now[place].prompt, now[place].samples) for place in sorted(chosen)],
        [group for place, group in enumerate(now) if place not in chosen],
    )
