"""Norms, activation, choice of experts, and the experts themselves."""

import pytest
import torch

from bailing_mtp.kernels.triton import decode
from bailing_mtp.kernels.triton.linear import linear
from tests.kernels.decode_cases import check_experts, check_linear, check_norms, check_route, check_swiglu

FP32 = torch.float32


@pytest.mark.parametrize(("R", "H"), [(1, 128), (13, 96), (0, 8)])
def test_norms(R: int, H: int) -> None:
    check_norms(decode, "cpu", FP32, R=R, H=H)


def test_norm_of_any_shape() -> None:
    x, weight = torch.randn(2, 3, 20), torch.randn(20)
    expected = torch.nn.functional.rms_norm(x, (20,), weight, 1e-6)
    torch.testing.assert_close(decode.rms_norm(x, weight, 1e-6), expected)


@pytest.mark.parametrize("limit", [None, 1.5])
def test_swiglu(limit: float | None) -> None:
    check_swiglu(decode, "cpu", FP32, R=5, F=1100, limit=limit)


@pytest.mark.parametrize(("E", "k", "groups", "kept"), [(16, 4, 4, 2), (12, 3, 1, 1), (30, 6, 5, 3)])
def test_route(E: int, k: int, groups: int, kept: int) -> None:
    check_route(decode, "cpu", FP32, R=19, H=72, E=E, k=k, groups=groups, kept=kept)


def test_equal_scores_go_to_the_lower_expert_and_group() -> None:
    # All scores are 1/2: the bias decides, and where it does not, the number.
    bias = torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.1, 0.0, 0.0])
    ids, weights = decode.route(torch.zeros(1, 16), torch.zeros(8, 16), bias, 4, 2, 3, 2.5)
    assert ids.tolist() == [[2, 5, 3]]
    torch.testing.assert_close(weights, torch.full((1, 3), 2.5 / 3))


def test_a_row_of_nans_names_real_and_distinct_experts() -> None:
    x = torch.randn(3, 16)
    x[1] = torch.nan
    weight, bias = torch.randn(8, 16), torch.zeros(8)
    ids, weights = decode.route(x, weight, bias, 4, 2, 4, 1.0)
    assert ids.unique().min() >= 0 and ids.max() < 8 and len(set(ids[1].tolist())) == 4
    assert weights[1].isnan().all() and weights[0].isfinite().all() and weights[2].isfinite().all()


@pytest.mark.parametrize("R", [1, 5, 20])
def test_experts(R: int) -> None:
    check_experts(decode, "cpu", FP32, R=R, k=4, H=72, F=40, E=9)


@pytest.mark.parametrize("R", [3, 12])
def test_experts_of_a_rank_and_a_slice_of_their_width(R: int) -> None:
    check_experts(
        decode, "cpu", FP32, R=R, k=3, H=48, F=64, E=8, first=3, n_local=4, width=(16, 48), limit=0.6
    )


@pytest.mark.parametrize("R", [2, 11, 40])
@pytest.mark.parametrize(
    ("shared_width", "limit", "shared_limit"), [(24, None, 0.6), (40, 0.5, None), (72, None, None)]
)
def test_shared_expert_and_residual(
    R: int, shared_width: int, limit: float | None, shared_limit: float | None
) -> None:
    check_experts(
        decode, "cpu", FP32, R=R, k=3, H=40, F=40, E=8, first=2, n_local=5, limit=limit,
        shared_width=shared_width, shared_limit=shared_limit, with_residual=R != 11,
    )  # fmt: skip


@pytest.mark.parametrize("R", [2, 11, 40])
@pytest.mark.parametrize("channels", [(0, 20), (20, 40), (8, 8)])
def test_a_slice_of_the_shared_expert(R: int, channels: tuple[int, int]) -> None:
    check_experts(
        decode, "cpu", FP32, R=R, k=3, H=40, F=24, E=8, first=2, n_local=5, shared_width=40, shared_channels=channels
    )


def test_all_rows_choose_the_same_experts() -> None:
    check_experts(decode, "cpu", FP32, R=70, k=2, H=32, F=32, E=2)


def test_no_expert_is_here() -> None:
    ids, weights = torch.arange(16).view(8, 2), torch.ones(8, 2)
    for rows in (2, 8):
        y = decode.experts(
            torch.randn(rows, 16), torch.cat([ids] * 5)[:rows] + 4 if rows == 2 else ids.repeat(1, 3) + 4,
            weights[:rows] if rows == 2 else weights.repeat(1, 3),
            torch.randn(4, 16, 16), torch.randn(4, 16, 8), 0, (0, 8), None,
        )  # fmt: skip
        assert y.shape == (rows, 16) and not y.any()


@pytest.mark.parametrize(("R", "H", "N"), [(1, 40, 33), (3, 1100, 10), (0, 8, 8), (5, 16, 8)])
def test_linear(R: int, H: int, N: int) -> None:
    check_linear(linear, "cpu", FP32, R=R, H=H, N=N)
