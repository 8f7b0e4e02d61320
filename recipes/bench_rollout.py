"""One rollout of the engine on random weights, timed step by step on the GPU.

n rows of a step, k drafts.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from bailing_mtp.config import RolloutConfig
from bailing_mtp.contracts.samples import Prompt, SamplingParams
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.engine import RolloutEngine
from bailing_mtp.rollout.graphs import CudaCapturer
from bailing_mtp.weights.view import WeightsView

from .bench_forced import ForcedDrafter
from .bench_laps import Laps, TimedCapturer

WARM_UP_TOKENS = 16
"""Of prompts and responses where a rollout only captures."""


@dataclass(frozen=True)
class Timing:
    """What one rollout took."""

    step_ms: float
    """Median from the end of a step to the end of the next, the host's part included."""
    slow_step_ms: float
    """What nine of ten steps stay under."""
    graph_ms: float
    """Median of the GPU's time inside a step's graph."""
    accept_length: float
    memory_bytes: int
    """Caches, states and graphs."""
    row_bytes: int
    """Of one row, without its latents."""
    free_bytes: int
    """Of the device, beside weights, the rollout's memory and what PyTorch keeps of what a prefill took."""
    rollout_ms: float
    """All decode steps, prefills between them included."""
    step_tokens: int
    """Of those steps."""
    steps_by_drafts: tuple[int, ...]


class TimedRollouts:
    """Rollouts of one size: one engine, whose graphs serve every temperature's runs."""

    def __init__(
        self,
        view: WeightsView,
        context: ParallelContext,
        n: int,
        k: int,
        prompt_tokens: int,
        new_tokens: int,
        adaptive: bool = False,
        tp_sum: Literal["library", "one_shot"] = "library",
    ) -> None:
        self._laps = Laps()
        self._drafter = ForcedDrafter(context.device)
        config = RolloutConfig(
            speculative_tokens=k,
            max_running=n,
            context_tokens=prompt_tokens + new_tokens,
            kernels="triton",
            cuda_graphs=True,
            keep_memory=True,
            adaptive=adaptive,
            tp_sum=tp_sum,
        )
        self._sizes = (n * context.dp, prompt_tokens, new_tokens)
        self._vocab_size = view.arch.vocab_size
        self.engine = RolloutEngine(
            lambda: view,
            context,
            config,
            drafter=self._drafter,
            tell=lambda line: None,
            make_capturer=lambda device: TimedCapturer(CudaCapturer(device), self._laps),
        )
        self._turn = 0

    def run(self, temperature: float, acceptance: str, warm_up_tokens: int = WARM_UP_TOKENS) -> Timing:
        """A short rollout captures, then the one that counts."""
        self._drafter.force(acceptance)
        for prompts in (self.short_prompts(temperature, warm_up_tokens), self._prompts(temperature)):
            self._laps.clear()
            self._turn += 1
            self.engine.generate(prompts, self._turn)
        torch.cuda.synchronize()
        steps, inside = self._laps.ms()
        stats = self.engine.stats
        return Timing(
            step_ms=statistics.median(steps),
            slow_step_ms=sorted(steps)[len(steps) * 9 // 10],
            graph_ms=statistics.median(inside),
            accept_length=stats.step_tokens / stats.row_steps,
            memory_bytes=self.engine.memory_bytes,
            row_bytes=self.engine.slot_bytes,
            free_bytes=torch.cuda.mem_get_info()[0],
            rollout_ms=self._laps.whole_ms(),
            step_tokens=stats.step_tokens,
            steps_by_drafts=tuple(stats.steps_by_drafts),
        )

    def _prompts(self, temperature: float) -> Sequence[Prompt]:
        _, prompt_tokens, new_tokens = self._sizes
        return self._random(prompt_tokens, temperature, new_tokens)

    def short_prompts(self, temperature: float, new_tokens: int) -> Sequence[Prompt]:
        """As many rows, whose prefill costs next to nothing: what steps launch does not depend on a prompt's length."""
        return self._random(min(WARM_UP_TOKENS, self._sizes[1]), temperature, new_tokens)

    def _random(self, prompt_tokens: int, temperature: float, new_tokens: int) -> Sequence[Prompt]:
        n = self._sizes[0]
        generator = torch.Generator().manual_seed(n)
        ids = torch.randint(self._vocab_size, (n, prompt_tokens), generator=generator).tolist()
        sampling = SamplingParams(temperature=temperature, max_new_tokens=new_tokens, ignore_eos=True)
        return [Prompt(prompt_ids=tuple(row), index=index, sampling=sampling) for index, row in enumerate(ids)]
