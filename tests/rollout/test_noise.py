"""Counter-based noise against published vectors, and its statistics."""

import pytest
import torch

from bailing_mtp.kernels.reference import noise

# Known answers of philox4x32-10 from the Random123 distribution: counter, key, output.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def keys(seed: int, n: int, step: int = 0) -> noise.NoiseKeys:
    full = torch.full
    return noise.NoiseKeys(full((n,), seed), full((n,), step), torch.arange(n), torch.zeros(n, dtype=torch.int64))


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_published_vectors(counter: list[int], key: list[int], words: list[int]):
    tensors = [torch.tensor([word]) for word in (*counter, *key)]
    found = noise.philox(tuple(tensors[:4]), tuple(tensors[4:]))
    assert [int(word) for word in found] == words


def test_uniform_stays_inside_and_is_fine_near_zero():
    u = noise.to_uniform(torch.tensor([0, 1, 2**31, 2**32 - 1]))
    assert u[0] == 0.5 * 2.0**-32 and u[1] == 1.5 * 2.0**-32
    assert 0 < u.min() and u.max() < 1
    assert noise.to_gumbel(u).isfinite().all()


@pytest.mark.parametrize(("first", "v"), [(0, 10), (3, 4), (4, 8), (5, 1), (7, 9)])
def test_a_shard_sees_its_slice_of_the_whole(first: int, v: int):
    position = torch.arange(5)
    whole = noise.gumbel(keys(7, 5), position, noise.FRESH, 0, 16)
    assert torch.equal(noise.gumbel(keys(7, 5), position, noise.FRESH, first, v), whole[:, first : first + v])


def test_word_layout_is_the_documented_one():
    k = noise.NoiseKeys(*(torch.tensor([word]) for word in (11, 5, 3, 2)))
    words = noise.philox(
        tuple(torch.tensor([word]) for word in (6 >> 2, 9 * 4 + noise.DRAFT, 3, 2)),
        (torch.tensor([11]), torch.tensor([5])),
    )
    expected = noise.to_gumbel(noise.to_uniform(words[6 & 3]))
    assert torch.equal(noise.gumbel(k, torch.tensor([9]), noise.DRAFT, 0, 8)[0, 6], expected[0])


def test_draws_are_uniform_and_uncorrelated():
    n = 40_000
    position = torch.arange(4).expand(n, 4)
    u = noise.accept_uniform(keys(1, n), position).double()
    assert abs(float(u.mean()) - 0.5) < 0.003 and abs(float(u.var()) - 1 / 12) < 0.001
    other_seed = noise.accept_uniform(keys(2, n), position).double()
    other_step = noise.accept_uniform(keys(1, n, step=1), position).double()
    draft = noise.gumbel(keys(1, n), position[:, 0], noise.DRAFT, 0, 1).double()
    fresh = noise.gumbel(keys(1, n), position[:, 0], noise.FRESH, 0, 1).double()
    columns = torch.cat([u, other_seed[:, :1], other_step[:, :1], draft, fresh], 1).T
    off_diagonal = torch.corrcoef(columns) - torch.eye(len(columns))
    assert off_diagonal.abs().max() < 0.025
    assert torch.equal(u, noise.accept_uniform(keys(1, n), position).double())


def test_gumbel_argmax_follows_the_distribution():
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    draws = noise.gumbel(keys(3, 50_000), torch.zeros(50_000, dtype=torch.int64), noise.FRESH, 0, 5)
    counts = torch.bincount((draws + probabilities.log()).argmax(-1), minlength=5)
    assert (counts / 50_000 - probabilities).abs().max() < 0.008
