"""When the steps of a rollout ran: a capturer whose graphs note their start and end on the GPU."""

from collections import Counter
from dataclasses import dataclass, field

import torch

from bailing_mtp.rollout.graphs import Body, Capturer, Replayable


@dataclass
class Laps:
    """Number of the graph, start and end of every replay, in their order."""

    laps: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def clear(self) -> None:
        self.laps.clear()

    def ms(self) -> tuple[list[float], list[float]]:
        """Of the graph that was replayed most, that of the full batch: from one end to the next, and inside."""
        most = Counter(number for number, _, _ in self.laps).most_common(1)[0][0]
        laps = [(start, end) for number, start, end in self.laps if number == most]
        steps = [before[1].elapsed_time(after[1]) for before, after in zip(laps, laps[1:], strict=False)]
        return steps, [start.elapsed_time(end) for start, end in laps]

    def whole_ms(self) -> float:
        """From the start of the first step to the end of the last."""
        return self.laps[0][1].elapsed_time(self.laps[-1][2])


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
        self.laps.laps.append((self.number, start, end))


class TimedCapturer:
    """A capturer whose graphs note when they ran."""

    def __init__(self, inner: Capturer, laps: Laps) -> None:
        self._inner, self._laps, self._n_graphs = inner, laps, 0
        self.warm_up, self.pool_bytes, self.release = inner.warm_up, inner.pool_bytes, inner.release

    def capture(self, body: Body) -> Replayable:
        self._n_graphs += 1
        return _TimedGraph(self._inner.capture(body), self._n_graphs, self._laps)
