"""Training kernels against their torch twins, under Triton's interpreter."""

import pytest
import torch

from bailing_mtp.kernels.triton import head, train
from tests.kernels import train_cases

FP32 = torch.float32


@pytest.mark.parametrize(
    ("R", "F", "limit", "weighted"),
    [(1, 1, None, True), (17, 63, 0.5, True), (5, 64, None, False), (3, 1500, 0.7, True)],
)
def test_swiglu(R: int, F: int, limit: float | None, weighted: bool):
    train_cases.check_swiglu(train, "cpu", FP32, R=R, F=F, limit=limit, weighted=weighted)


@pytest.mark.parametrize(("T", "h", "V"), [(1, 1, 15), (17, 3, 16), (40, 2, 24)])
def test_gated_norm(T: int, h: int, V: int):
    train_cases.check_gated_norm(train, "cpu", FP32, T=T, h=h, V=V)


@pytest.mark.parametrize(("T", "k", "H"), [(1, 1, 1), (15, 4, 63), (9, 8, 600)])
def test_sum_choices(T: int, k: int, H: int):
    train_cases.check_sum_choices(train, "cpu", FP32, T=T, k=k, H=H)


@pytest.mark.parametrize(("R", "E", "k", "groups", "kept"), [(17, 16, 4, 4, 2), (3, 6, 2, 1, 1)])
def test_choose(R: int, E: int, k: int, groups: int, kept: int):
    train_cases.check_choose(train, "cpu", R=R, E=E, k=k, groups=groups, kept=kept)


@pytest.mark.parametrize(("t", "v", "scale"), [(3, 9, 1.0), (4, 5000, 1.0), (3, 4097, 1.4)])
def test_head(t: int, v: int, scale: float):
    train_cases.check_head(head, "cpu", FP32, t=t, v=v, scale=scale)


def test_nan_stays():
    train_cases.check_nan_row(head, "cpu")
