"""Row settings and statistics for the tests of the sampling maths."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bailing_mtp.kernels.reference.noise import NoiseKeys
from bailing_mtp.rollout.distribution import RowSettings, StepRules

ALL_RULES = StepRules(truncates=True, masks=True, greedy=True)


def settings(
    n: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_new: int = 0,
    index: int = 0,
    stop: tuple[int, ...] = (),
    suppress: tuple[int, ...] = (),
) -> RowSettings:
    """n equal rows."""
    return RowSettings(
        temperature=torch.full((n,), float(temperature)),
        top_k=torch.full((n,), top_k, dtype=torch.int32),
        top_p=torch.full((n,), float(top_p)),
        min_new=torch.full((n,), min_new, dtype=torch.int32),
        response_index=torch.full((n,), index, dtype=torch.int32),
        stop_ids=torch.tensor([stop or (-1,)] * n),
        suppress_ids=torch.tensor([suppress or (-1,)] * n),
    )


def noise_keys(n: int, seed: int = 0, step: int = 0) -> NoiseKeys:
    """n rows that differ by their prompt index."""
    word = torch.full((n,), 1)
    return NoiseKeys(word * seed, word * step, torch.arange(n), word * 0)


def chi_square_p(counts: Tensor, probabilities: Tensor) -> float:
    """Upper tail of the chi-square test that counts follow probabilities; cells below 5 expected are joined."""
    counts, expected = counts.double().flatten(), probabilities.double().flatten() * counts.sum()
    assert counts[expected == 0].sum() == 0, "a token of probability zero was drawn"
    rare = (expected < 5) & (expected > 0)
    common = expected >= 5
    cells = [(counts[common], expected[common])]
    if bool(rare.any()):
        cells.append((counts[rare].sum()[None], expected[rare].sum()[None]))
    observed, wanted = (torch.cat(part) for part in zip(*cells, strict=True))
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    degrees = len(wanted) - 1
    if degrees < 1:
        return 1.0
    return float(torch.special.gammaincc(torch.tensor(degrees / 2.0).double(), torch.tensor(statistic / 2).double()))


def two_sample_p(first: Tensor, second: Tensor) -> float:
    """Chi-square test that two count tables come from one distribution."""
    first, second = first.double().flatten(), second.double().flatten()
    total = first + second
    keep = total >= 10
    rest = [(first[~keep].sum(), second[~keep].sum())]
    a, b = torch.cat([first[keep], rest[0][0][None]]), torch.cat([second[keep], rest[0][1][None]])
    a, b = a[a + b > 0], b[a + b > 0]
    scale = math.sqrt(float(second.sum() / first.sum()))
    statistic = float(((a * scale - b / scale) ** 2 / (a + b)).sum())
    degrees = torch.tensor((len(a) - 1) / 2).double()
    return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2).double()))
