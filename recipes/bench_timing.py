"""Time of calls inside a CUDA graph, on inputs that are in no cache."""

import statistics
from collections.abc import Callable, Sequence

import torch

Timer = Callable[[Sequence[Callable[[], object]]], float]
"""Calls -> median seconds of one call."""

COLD_BYTES = 200_000_000
"""Inputs of this many bytes in a round leave nothing of one another in a 60 MB cache."""
MOST_SETS = 24
LEAST_CALLS = 12
FLUSH_BYTES = 2**30
"""Read before each replay: it empties the cache, and keeps the GPU busy until the replay is queued."""
WARM_UP_REPLAYS = 2


def sets_of_inputs(floor_bytes: int) -> int:
    """Sets to take turns among; where there are MOST_SETS, a replay uses each only once."""
    return max(2, min(MOST_SETS, -(-COLD_BYTES // floor_bytes)))


def in_turn(calls: Sequence[Callable[[], object]]) -> list[Callable[[], object]]:
    """Each call at least once, LEAST_CALLS in all at least, in rounds."""
    return [calls[number % len(calls)] for number in range(max(len(calls), LEAST_CALLS))]


class GraphTimer:
    """Times calls as one CUDA graph. Nothing in them may wait for the host."""

    def __init__(self, device: torch.device, replays: int) -> None:
        self._replays = replays
        self._flush = torch.ones(FLUSH_BYTES // 4, device=device)

    def __call__(self, calls: Sequence[Callable[[], object]]) -> float:
        """Median seconds of one of `calls`, over the replays."""
        graph = self._capture(calls)
        for _ in range(WARM_UP_REPLAYS):
            graph.replay()
        replays_s = [self._replay_s(graph) for _ in range(self._replays)]
        return statistics.median(replays_s) / len(calls)

    @staticmethod
    def _capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
        # Compiles what is not compiled, outside the capture and on a stream that leaves nothing to it.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls[:2]:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph

    def _replay_s(self, graph: torch.cuda.CUDAGraph) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.sum()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
