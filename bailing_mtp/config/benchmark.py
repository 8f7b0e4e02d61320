"""Settings of the benchmark verb."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .errors import raise_if_any
from .section import PositiveFloat, PositiveInt
from .verbs import RunConfig

Sizes = Annotated[tuple[PositiveInt, ...], Field(strict=False, min_length=1)]


class BenchmarkConfig(RunConfig):
    """python -m recipes.benchmark"""

    what: Literal["kernels", "decode", "train"]
    """kernels: each Triton decode kernel against its bytes, and the passes of a decode step. train: training steps
    with and without the MTP loss and recompute, and where the time of one goes."""
    rows: Sizes = (1, 16, 64, 256)
    """Sequences of a step."""
    fed_tokens: Sizes = (1, 3)
    """Tokens that a step feeds to each sequence: drafts + 1."""
    context_tokens: PositiveInt = 256
    """Cached positions of each sequence."""
    tokens: Sizes = (8192, 4096, 16384)
    """train: tokens of a packed microbatch; the first count is measured with every MTP loss and recompute."""
    layers: PositiveInt | None = None
    """train: trunk layers; null = as many whole groups of layers as fit beside reserve_gb."""
    reserve_gb: PositiveFloat = 48.0
    """train: GiB left to activations where `layers` is null."""
    steps: PositiveInt = 4
    """train: timed steps; their median is printed."""
    replays: PositiveInt = 12
    """Timed replays of each CUDA graph; their median is printed."""
    copy_tb_per_s: PositiveFloat = 4.3
    """Memory bandwidth that the floor assumes, in 10^12 bytes/s; 4.3 is a measured copy on an H200."""

    @model_validator(mode="after")
    def _runs_on_random_weights(self) -> Self:
        problems, what = [], self.what
        if self.checkpoint.load is not None:
            problems.append(f"checkpoint.load: is not read by what={what}, whose weights are random; leave it null")
        for name in ("tp", "ep"):
            size = getattr(self.parallel, name)
            if size > 1:
                problems.append(f"parallel.{name}: {size} is not allowed; what={what} runs on one GPU; allowed: 1")
        longest = max(self.fed_tokens)
        if self.context_tokens < longest:
            problems.append(f"context_tokens: {self.context_tokens} must be at least {longest}, the most of fed_tokens")
        raise_if_any(problems)
        return self
