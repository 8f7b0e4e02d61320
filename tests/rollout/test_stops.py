"""Where a response ends."""

import pytest
import torch

from bailing_mtp.rollout.stops import LENGTH, RUNNING, STOP, StopStrings, cut_block


@pytest.mark.parametrize(
    ("tokens", "n_tokens", "stop", "room", "kept", "state"),
    [
        ([1, 9, 3], 3, (9,), 8, 2, STOP),
        ([1, 2, 9], 3, (9,), 8, 3, STOP),
        ([1, 2, 3], 2, (9,), 8, 2, RUNNING),
        ([1, 2, 3], 3, (9,), 2, 2, LENGTH),
        ([1, 2, 3], 3, (9,), 3, 3, LENGTH),
        # A run [a, stop, b, c] under caps 10, 3, 2 and 1.
        ([1, 9, 3, 4], 4, (9,), 10, 2, STOP),
        ([1, 9, 3, 4], 4, (9,), 3, 2, STOP),
        ([1, 9, 3, 4], 4, (9,), 2, 2, STOP),
        ([1, 9, 3, 4], 4, (9,), 1, 1, LENGTH),
        # The stop id stands after the fresh token: a column that was never drawn.
        ([1, 2, 9], 2, (9,), 8, 2, RUNNING),
        ([9, 9, 9], 3, (9,), 8, 1, STOP),
        ([1, 2, 3], 3, (-1, -1), 8, 3, RUNNING),
        ([1, 7, 8], 3, (8, 7), 8, 2, STOP),
        ([1, 2, 3], 0, (9,), 8, 0, RUNNING),
    ],
)
def test_block(tokens: list[int], n_tokens: int, stop: tuple[int, ...], room: int, kept: int, state: int):
    found = cut_block(torch.tensor([tokens]), torch.tensor([n_tokens]), torch.tensor([stop]), torch.tensor([room]))
    assert (int(found.kept_n), int(found.state_n)) == (kept, state)


def decode(ids: list[int]) -> str:
    return "".join("abcdefghij"[token] for token in ids)


@pytest.mark.parametrize("split", range(5))
def test_a_stop_string_across_steps(split: int):
    watcher = StopStrings(["fgh"], decode)
    tokens = [1, 5, 6, 7, 9]
    first, second = tokens[:split], tokens[split:]
    found = watcher.add(first)
    if split >= 4:
        assert found == 4
    else:
        assert found is None and watcher.add(second) == 4 - split


def test_the_token_that_completes_the_string_ends_the_response():
    pieces = {1: "x", 2: "the en", 3: "d and more"}
    watcher = StopStrings(["end"], lambda ids: "".join(pieces[token] for token in ids))
    assert watcher.add([1, 2]) is None
    assert watcher.add([3, 1]) == 1


def test_each_of_several_strings_and_a_long_response():
    watcher = StopStrings(["zz", "aj"], decode)
    assert watcher.add([1] * 500) is None
    assert watcher.add([0, 9]) == 2


def test_no_string_ends_a_response_before_its_least_length():
    """Tokens a f g h f g h: the first "fgh" is complete at 4, the second at 7."""
    tokens = [0, 5, 6, 7, 5, 6, 7, 9]
    for least, kept in ((4, 4), (5, 7), (7, 7), (8, None)):
        watcher = StopStrings(["fgh"], decode, least)
        found = watcher.add(tokens[:3])
        assert found is None and watcher.add(tokens[3:]) == (None if kept is None else kept - 3)
