"""CUDA graphs of decode steps: captured when a shape is first wanted, replayed from then on.

A graph holds addresses: of the rollout's memory, which it therefore does not outlive, and of the weights, which are
updated in place. All ranks that communicate inside a step capture together, since they agree on shapes first.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch

from bailing_mtp.errors import UserError
from bailing_mtp.rollout.distribution import StepRules
from bailing_mtp.rollout.memory import GIB

Body = Callable[[], None]
Result = TypeVar("Result")


class StepShape(NamedTuple):
    """What a captured step depends on."""

    rows: int
    """Padded rows."""
    drafts: int
    rules: StepRules


class Replayable(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Queue it."""
        ...


class Capturer(Protocol):
    """How a body becomes a graph."""

    def warm_up(self, body: Body) -> None:
        """Run it once, so that kernels are compiled and workspaces exist."""
        ...

    def capture(self, body: Body) -> Replayable:
        """Record it; nothing runs."""
        ...

    def pool_bytes(self) -> int:
        """Device memory of all graphs together."""
        ...

    def release(self) -> None:
        """Called when no replay may follow; all graphs are dropped right after."""
        ...


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures of a process: the libraries keep a workspace of 32 MiB for every stream they ran on."""
    return torch.cuda.Stream(device)


class CudaCapturer:
    """One stream and one memory pool for all graphs: replays follow one another, and outputs live elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, body: Body) -> None:
        # Eager collectives on the groups of the graphs: no graph may run meanwhile (ParallelContext.for_graphs).
        torch.cuda.synchronize(self._device)
        current = torch.cuda.current_stream(self._device)
        # On the stream of the capture, whose library workspaces then exist before it.
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            body()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)

    def capture(self, body: Body) -> Replayable:
        graph = torch.cuda.CUDAGraph()
        # Threads that watch over process groups may query events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            body()
        return graph

    def pool_bytes(self) -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(part["total_size"] for part in segments if tuple(part["segment_pool_id"]) == tuple(self._pool))

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        self._pool = torch.cuda.graph_pool_handle()


class StepGraphs:
    """The graphs of one rollout memory."""

    def __init__(
        self, capturer: Capturer, any_rank: Callable[[bool], bool], most: int, tell: Callable[[str], None]
    ) -> None:
        """any_rank: whether a flag is set on any rank that captures along, the same answer on all of them.
        most: graphs that one set of rules and drafts can need."""
        self._capturer, self._any_rank, self._most, self._tell = capturer, any_rank, most, tell
        self._graphs: dict[StepShape, Replayable] = {}
        self._addresses: tuple[int, ...] = ()
        self.capture_s = 0.0
        """Seconds spent in captures, warm-ups included."""
        self.pool_bytes = 0

    def __contains__(self, shape: StepShape) -> bool:
        return shape in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    def require_addresses(self, addresses: Sequence[int]) -> None:
        """Forget all graphs if the weights have moved, on any rank. Collective; called as a rollout begins."""
        moved = bool(self._graphs) and self._addresses != tuple(addresses)
        self._addresses = tuple(addresses)
        if self._any_rank(moved):
            self._tell(f"rollout: weights have moved: {len(self._graphs)} CUDA graphs are captured again")
            self.release()

    def capture(self, shape: StepShape, body: Body) -> None:
        """Make the graph of `shape`. Collective. Raises UserError where memory does not suffice."""
        started_s, what = time.monotonic(), f"{shape.rows} rows, {shape.drafts} drafts"
        number = 1 + sum(known[1:] == shape[1:] for known in self._graphs)
        self._tell(f"rollout: capturing CUDA graph {number} of at most {self._most} ({what})")
        self._together(what, lambda: self._capturer.warm_up(body))
        graph = self._together(what, lambda: self._capturer.capture(body))
        self._graphs[shape] = graph
        self.pool_bytes = self._capturer.pool_bytes()
        seconds = time.monotonic() - started_s
        self.capture_s += seconds
        self._tell(f"rollout: {what}: captured in {seconds:.1f} s, all graphs hold {self.pool_bytes / GIB:.2f} GiB")

    def replay(self, shape: StepShape) -> None:
        self._graphs[shape].replay()

    def release(self) -> None:
        """Drop all graphs; later steps capture anew."""
        self._capturer.release()
        self._graphs.clear()
        self.pool_bytes = 0

    def _together(self, what: str, run: Callable[[], Result]) -> Result:
        """Run on all ranks; where one of them fails none goes on to wait for it."""
        failure, result = None, None
        try:
            result = run()
        except RuntimeError as error:
            failure = error
        if self._any_rank(failure is not None):
            if failure is not None and not _is_out_of_memory(failure):
                raise failure
            whose = "no memory is left" if failure is not None else "another rank failed, or has no memory left,"
            raise UserError(
                f"rollout.cuda_graphs: {whose} to capture the graph of a step of {what} ({len(self._graphs)} graphs "
                f"hold {self.pool_bytes / GIB:.2f} GiB); lower rollout.memory_gb, which gives caches less, or "
                "rollout.max_running, or set rollout.cuda_graphs=false"
            ) from failure
        return result


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether it, or what it was raised over (ending a broken capture raises again), is for want of memory."""
    while error is not None:
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "ALLOC_FAILED" in text:
            return True
        error = error.__cause__ or error.__context__
    return False
