"""Draws in one pass: log-sum-exp, the noise, residuals, ties, and a vocabulary shard that starts anywhere."""

import pytest
import torch

from tests.kernels.decode_cases import check_draw, check_log_sum_exps


def test_log_sum_exps() -> None:
    check_log_sum_exps("cpu", torch.float32, r=3, v=5000)


@pytest.mark.parametrize(("v", "first_id"), [(5000, 0), (301, 302)])
def test_draws(v: int, first_id: int) -> None:
    check_draw("cpu", torch.float32, n=5, v=v, first_id=first_id)
