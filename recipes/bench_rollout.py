"""One rollout of the engine on random weights, timed step by step on the GPU.

n rows of a step, k drafts.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from bailing_mtp.config import RolloutConfig
from bailing_mtp.contracts.samples import Prompt, SamplingParams
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.engine import RolloutEngine
from bailing_mtp.rollout.graphs import Body, Capturer, CudaCapturer, Replayable
from bailing_mtp.weights.view import WeightsView

from .bench_forced import ForcedDrafter

WARM_UP_TOKENS = 16


@dataclass
class Laps:
    """Start and end of every replay, by graph."""

    by_graph: dict[int, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = field(default_factory=dict)

    def clear(self) -> None:
        self.by_graph.clear()

    def ms(self) -> tuple[list[float], list[float]]:
        """Of the graph that was replayed most, that of the full batch: from one end to the next, and inside."""
        laps = max(self.by_graph.values(), key=len)
        steps = [before[1].elapsed_time(after[1]) for before, after in zip(laps, laps[1:], strict=False)]
        return steps, [start.elapsed_time(end) for start, end in laps]


@dataclass
class _TimedGraph:
    graph: Replayable
    number: int
    laps: Laps

    def replay(self) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        self.laps.by_graph.setdefault(self.number, []).append((start, end))


class TimedCapturer:
    """A capturer whose graphs note when they ran."""

    def __init__(self, inner: Capturer, laps: Laps) -> None:
        self._inner, self._laps, self._n_graphs = inner, laps, 0
        self.warm_up, self.pool_bytes, self.release = inner.warm_up, inner.pool_bytes, inner.release

    def capture(self, body: Body) -> Replayable:
        self._n_graphs += 1
        return _TimedGraph(self._inner.capture(body), self._n_graphs, self._laps)


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


class TimedRollouts:
    """Rollouts of one size: one engine, whose graphs serve every temperature's runs."""

    def __init__(
        self, view: WeightsView, context: ParallelContext, n: int, k: int, prompt_tokens: int, new_tokens: int
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

    def run(self, temperature: float, acceptance: str) -> Timing:
        """A short rollout captures, then the one that counts."""
        self._drafter.force(acceptance)
        for new_tokens in (WARM_UP_TOKENS, self._sizes[2]):
            self._laps.clear()
            self._turn += 1
            self.engine.generate(self.prompts(temperature, new_tokens), self._turn)
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
        )

    def prompts(self, temperature: float, new_tokens: int) -> Sequence[Prompt]:
        n, prompt_tokens, _ = self._sizes
        generator = torch.Generator().manual_seed(n)
        ids = torch.randint(self._vocab_size, (n, prompt_tokens), generator=generator).tolist()
        sampling = SamplingParams(temperature=temperature, max_new_tokens=new_tokens, ignore_eos=True)
        return [Prompt(prompt_ids=tuple(row), index=index, sampling=sampling) for index, row in enumerate(ids)]
