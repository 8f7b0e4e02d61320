"""One process group and a few small models for all tests of the rollout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bailing_mtp.model.build import BuiltModel
from bailing_mtp.parallel.context import ParallelContext
from tests.distributed.worlds import layout
from tests.rollout.program_rig import random_model


@pytest.fixture(scope="module")
def alone() -> Iterator[ParallelContext]:
    with layout(tp=1, ep=1) as context:
        yield context


@pytest.fixture(scope="module")
def small(alone: ParallelContext) -> BuiltModel:
    """Vocabulary of 24, every kind of layer."""
    return random_model(alone)
