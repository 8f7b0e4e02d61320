"""Which launch a sum over peer memory takes, with stand-ins that add as a group of two equal ranks would."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

from bailing_mtp.parallel.collectives import TWO_SHOT_ELEMENTS, PeerSum

ROOM = 2 * TWO_SHOT_ELEMENTS


@pytest.mark.parametrize(
    ("shape", "way"),
    [
        ((8, 128), "one"),
        ((1, TWO_SHOT_ELEMENTS - 8), "one"),
        ((2, TWO_SHOT_ELEMENTS // 2), "two"),
        ((2, TWO_SHOT_ELEMENTS), "two"),
        ((1, ROOM + 8), "library"),
        ((3, 5), "library"),
    ],
)
def test_the_size_chooses(shape: tuple[int, int], way: str):
    taken: list[str] = []

    def one(room: Tensor, x: Tensor, *_: str) -> Tensor:
        assert room.shape == x.shape and room.dim() == 1
        taken.append("one")
        return 2 * room.copy_(x)

    def two(room: Tensor, *_: str) -> Tensor:
        taken.append("two")
        return room.mul_(2)

    def library(x: Tensor, group: object) -> None:
        taken.append("library")
        x.mul_(2)

    ops = SimpleNamespace(one_shot_all_reduce_copy=one, two_shot_all_reduce_=two)
    with (
        mock.patch.object(symmetric, "empty", torch.empty),
        mock.patch.object(symmetric, "rendezvous"),
        mock.patch.object(torch.ops, "symm_mem", ops),
        mock.patch.object(dist, "all_reduce", library),
    ):
        peers = PeerSum(SimpleNamespace(group_name="0"), ROOM, torch.bfloat16, torch.device("cpu"))
        x = torch.arange(shape[0] * shape[1]).view(shape).to(torch.bfloat16)
        expected = 2 * x
        found = peers(x)
        assert taken == [way] and torch.equal(found, expected)
        # The next sum overwrites the room, and leaves this one alone.
        peers(torch.zeros(1, 8, dtype=torch.bfloat16))
        assert torch.equal(found, expected)
