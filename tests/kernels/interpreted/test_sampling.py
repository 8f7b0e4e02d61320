"""Draws in one pass: log-sum-exp, the noise, residuals, ties, and a vocabulary shard that starts anywhere; then the
decisions of a step, and what it enters in its slots."""

import pytest
import torch

from bailing_mtp.kernels.triton import decode
from tests.kernels import sampling_cases as cases

FP32 = torch.float32
SHARDS = [(5000, 0), (301, 302)]


def test_log_sum_exps() -> None:
    cases.check_log_sum_exps(decode, "cpu", FP32, n=2, S=2, v=5000)


@pytest.mark.parametrize(("v", "first_id"), SHARDS)
def test_draws(v: int, first_id: int) -> None:
    cases.check_draw(decode, "cpu", FP32, n=5, v=v, first_id=first_id)
    cases.check_draw_fresh(decode, "cpu", FP32, n=3, k=0, v=v, first_id=first_id)
    for k in (1, 3):
        cases.check_draw_fresh(decode, "cpu", FP32, n=2 * k + 4, k=k, v=v, first_id=first_id)


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_verdicts(k: int) -> None:
    cases.check_verdict(decode, "cpu", FP32, n=40, k=k, v=31, first_id=62)


@pytest.mark.parametrize("S", [1, 3])
def test_what_a_step_leaves(S: int) -> None:
    cases.check_settle(decode, "cpu", slots=130, n=103, S=S)
    cases.check_slots(decode, "cpu", FP32, slots=9, n=6, S=S, H=20)
