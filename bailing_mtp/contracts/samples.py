"""Prompts that go into a rollout, samples that come out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "cancelled", "error", "unfinished"]
"""unfinished: the rollout ended before the response did."""
MAX_SEED = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn and when its response ends."""

    temperature: float = 1.0
    """Divides the logits; 0 = greedy."""
    top_k: int | None = None
    """Keep the k likeliest tokens; None = all."""
    top_p: float = 1.0
    """Keep tokens while the mass before them is <= top_p; 1 = all."""
    min_new_tokens: int = 0
    """Response tokens before a stop token may be drawn."""
    max_new_tokens: int = 256
    """Longest response in tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response, beside the tokenizer's own."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a response, with the token that completes them."""
    suppress_token_ids: tuple[int, ...] = ()
    """Ids that are never drawn."""
    ignore_eos: bool = False
    """Do not end at the tokenizer's end of text."""
    seed: int = 0
    """First word of the noise key."""

    def __post_init__(self) -> None:
        ranges = (
            ("temperature", 0.0 <= self.temperature < float("inf"), "a number >= 0"),
            ("top_k", self.top_k is None or self.top_k >= 1, "an integer >= 1, or null"),
            ("top_p", 0.0 < self.top_p <= 1.0, "a number in (0, 1]"),
            ("min_new_tokens", self.min_new_tokens >= 0, "an integer >= 0"),
            ("max_new_tokens", self.max_new_tokens >= 1, "an integer >= 1"),
            ("seed", 0 <= self.seed <= MAX_SEED, f"an integer in 0..{MAX_SEED}"),
            ("stop_strings", all(self.stop_strings), "texts that are not empty"),
        )
        for name, is_allowed, allowed in ranges:
            if not is_allowed:
                raise ValueError(f"sampling.{name}: {getattr(self, name)!r} is not allowed; must be {allowed}")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt and how many responses it gets."""

    prompt_ids: tuple[int, ...]
    index: int
    """Place among the prompts of the rollout: a part of the noise key, and unique."""
    sampling: SamplingParams = SamplingParams()
    samples_per_prompt: int = 1
    record: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """The data line the prompt came from, handed through."""
    number: int | None = None
    """Which of its loader's prompts it is; handed through."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response. The lists have one entry per response token."""

    prompt_index: int
    sample_index: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """log-softmax of the logits: no temperature, no truncation, no suppression."""
    processed_logprobs: tuple[float, ...]
    """Log-probability under the distribution that was sampled."""
    kept_logmass: tuple[float, ...] | None
    """Log of the mass of softmax(logits / temperature), over the whole vocabulary, that masks, top-k and top-p
    left; processed + kept_logmass = tempered log-probability. None at temperature 0."""
    finish_reason: FinishReason
    error: str | None = None
    versions: tuple[int, ...] = ()
    """Version of the weights that drew each token."""
    routes: np.ndarray | None = field(default=None, compare=False, repr=False)
    """Expert ids that the trunk chose for the first n tokens of prompt and response, uint8 or int16 [n, L, k]: L
    expert layers, k experts per token. A last token that was drawn and never fed has none. None: not recorded."""


@dataclass(frozen=True)
class RolloutGroup:
    """A prompt with all its samples, in sample order."""

    prompt: Prompt
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class PartialGroup:
    """A prompt under way, from one rollout to the next, with what its samples have so far.

    An unfinished sample goes on from its last token, which stands in no cache yet; its earlier tokens are prefilled
    again under the weights that are then in force, and every token keeps the version that drew it.
    """

    prompt: Prompt
    rollout_step: int
    """Rollout that the prompt began in, the second word of its noise key. It stays: the noise of a position past the
    last token has not decided anything yet, so that the sample may draw with it, whatever the weights are then."""
    samples: tuple[Sample, ...] = ()
    """In sample order; none before the first rollout."""

    @property
    def is_complete(self) -> bool:
        """Every sample has ended."""
        return len(self.samples) == self.prompt.samples_per_prompt and not self.unfinished

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Sample indices that have to go on, or to begin."""
        ended = {sample.sample_index for sample in self.samples if sample.finish_reason != "unfinished"}
        return tuple(index for index in range(self.prompt.samples_per_prompt) if index not in ended)
