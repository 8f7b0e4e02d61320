"""One request from submission to sample: checked, written to the device, collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from bailing_mtp.contracts.samples import FinishReason, Prompt, Sample, SamplingParams
from bailing_mtp.errors import UserError
from bailing_mtp.rollout.distribution import StepRules
from bailing_mtp.rollout.memory import RolloutMemory
from bailing_mtp.rollout.sequences import Row
from bailing_mtp.rollout.stops import StopStrings
from bailing_mtp.rollout.transfer import to_device

_RECORDED = ("logprobs", "processed_logprobs", "kept_logmass", "versions")
"""Lists of a request, one entry per response token, that its sample hands on."""


class TextTokenizer(Protocol):
    """What the engine asks of a tokenizer."""

    eos_ids: tuple[int, ...]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of these ids."""
        ...


@dataclass(frozen=True)
class Limits:
    """What a rollout makes room for."""

    context_tokens: int
    """Longest prompt and response together."""
    max_running: int
    """Rows decoded together on one replica."""
    n_templates: int = 8
    """Prompts with several samples that are prefilled at a time."""
    max_stops: int = 16
    """Stop ids of one request, end-of-text ids included."""
    max_suppressed: int = 64
    """Suppressed ids of one request."""


@dataclass(eq=False)
class Request:
    """One response on its way."""

    prompt: Prompt
    rollout_step: int
    row: Row
    stop_ids: tuple[int, ...]
    stop_strings: StopStrings | None
    logprobs: list[float] = field(default_factory=list)
    processed_logprobs: list[float] = field(default_factory=list)
    kept_logmass: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def go_on(self, sample: Sample) -> None:
        """Take what an earlier rollout recorded of this response; the row has its tokens already."""
        for name in _RECORDED:
            getattr(self, name).extend(getattr(sample, name) or ())
        if self.stop_strings is not None:
            self.stop_strings.add(sample.response_ids)

    def sample(
        self, finish_reason: FinishReason, error: str | None = None, routes: np.ndarray | None = None
    ) -> Sample:
        return Sample(
            prompt_index=self.prompt.index,
            sample_index=self.row.sample_index,
            prompt_ids=self.prompt.prompt_ids,
            response_ids=tuple(self.row.response),
            logprobs=tuple(self.logprobs),
            processed_logprobs=tuple(self.processed_logprobs),
            kept_logmass=None if self.prompt.sampling.temperature == 0 else tuple(self.kept_logmass),
            finish_reason=finish_reason,
            error=error,
            versions=tuple(self.versions),
            routes=routes,
        )


def stop_ids_of(prompt: Prompt, tokenizer: TextTokenizer | None) -> tuple[int, ...]:
    """The ids that end a response to this prompt."""
    sampling = prompt.sampling
    eos_ids = () if tokenizer is None or sampling.ignore_eos else tokenizer.eos_ids
    return tuple(dict.fromkeys((*sampling.stop_token_ids, *eos_ids)))


def check_prompt(
    prompt: Prompt, tokenizer: TextTokenizer | None, vocab_size: int, limits: Limits, origin: str | None = None
) -> None:
    """Raise UserError, naming the prompt or its origin, for a request that could not run."""
    sampling, where = prompt.sampling, origin or f"prompt {prompt.index}"
    stop_ids = stop_ids_of(prompt, tokenizer)
    tokens = len(prompt.prompt_ids) + sampling.max_new_tokens
    if not prompt.prompt_ids:
        raise UserError(f"{where}: has no tokens; allowed: at least one")
    if prompt.samples_per_prompt < 1:
        raise UserError(f"{where}: samples_per_prompt: {prompt.samples_per_prompt}; allowed: at least 1")
    if prompt.samples_per_prompt > 1 and not limits.n_templates:
        raise UserError(f"{where}: samples_per_prompt: {prompt.samples_per_prompt} needs room for a template")
    if tokens > limits.context_tokens:
        raise UserError(
            f"{where}: {len(prompt.prompt_ids)} prompt tokens and sampling.max_new_tokens="
            f"{sampling.max_new_tokens} exceed rollout.context_tokens={limits.context_tokens}"
        )
    for name, ids in (
        ("prompt_ids", prompt.prompt_ids),
        ("sampling.suppress_token_ids", sampling.suppress_token_ids),
        ("sampling.stop_token_ids", sampling.stop_token_ids),
    ):
        outside = [token for token in ids if not 0 <= token < vocab_size]
        if outside:
            raise UserError(f"{where}: {name}: {outside[0]} is no token; allowed: 0 to {vocab_size - 1}")
    for name, ids, limit in (
        ("sampling.stop_token_ids and end-of-text ids", stop_ids, limits.max_stops),
        ("sampling.suppress_token_ids", sampling.suppress_token_ids, limits.max_suppressed),
    ):
        if len(ids) > limit:
            raise UserError(f"{where}: {name}: {len(ids)} ids; allowed here: at most {limit}")
    never = set(sampling.suppress_token_ids) | (set(stop_ids) if sampling.min_new_tokens else set())
    if len(never) == vocab_size:
        raise UserError(f"{where}: sampling.suppress_token_ids leave no token to draw")
    if sampling.stop_strings and tokenizer is None:
        raise UserError(f"{where}: sampling.stop_strings need a tokenizer and there is none")


def rules_of(sampling: SamplingParams) -> StepRules:
    """What a row with these settings asks of its steps."""
    return StepRules(
        truncates=sampling.temperature > 0 and (sampling.top_k is not None or sampling.top_p < 1),
        masks=bool(sampling.suppress_token_ids or sampling.min_new_tokens),
        greedy=sampling.temperature == 0,
    )


def write_settings(memory: RolloutMemory, requests: Sequence[Request]) -> None:
    """Put the settings of rows that start, or start again, into their slots."""
    if not requests:
        return
    state, device = memory.slots, memory.device
    slots = to_device([request.row.slot for request in requests], device)
    settings = [request.prompt.sampling for request in requests]
    columns = {
        "temperature": [s.temperature for s in settings],
        "top_k": [s.top_k or 0 for s in settings],
        "top_p": [s.top_p for s in settings],
        "min_new": [s.min_new_tokens for s in settings],
        "max_new": [s.max_new_tokens for s in settings],
        "generated": [len(request.row.response) for request in requests],
        "finished": [False] * len(requests),
        "error": [False] * len(requests),
        "prompt_index": [request.prompt.index for request in requests],
        "sample_index": [request.row.sample_index for request in requests],
        "rollout_step": [request.rollout_step for request in requests],
        "seed": [s.seed for s in settings],
        "stop_ids_Nx": [_padded(r.stop_ids, memory.plan.max_stops) for r in requests],
        "suppress_ids_Nx": [_padded(s.suppress_token_ids, memory.plan.max_suppressed) for s in settings],
    }
    for name, values in columns.items():
        target = getattr(state, name)
        target[slots] = to_device(values, device, target.dtype)


def _padded(ids: Sequence[int], length: int) -> list[int]:
    return [*ids, *[-1] * (length - len(ids))]
