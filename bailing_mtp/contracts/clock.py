"""Which version of the weights is the newest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class WeightsClock:
    """Counts optimizer steps; the trainer advances it, a published view compares itself with it."""

    trained: int = 0
    """Optimizer steps since the run began."""
