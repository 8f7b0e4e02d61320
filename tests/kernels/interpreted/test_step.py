"""The kernels around latent attention, joined projections, and what a pass begins with."""

import pytest
import torch

from bailing_mtp.kernels.triton import decode
from tests.kernels import step_cases as cases

FP32 = torch.float32


@pytest.mark.parametrize("R", [1, 4, 7, 130, 0])
def test_linears(R: int) -> None:
    cases.check_linears(decode, "cpu", FP32, R=R, H=40, sizes=(33, 5, 18))


def test_linears_of_two_and_of_one() -> None:
    cases.check_linears(decode, "cpu", FP32, R=2, H=130, sizes=(7, 9))
    cases.check_linears(decode, "cpu", FP32, R=6, H=130, sizes=(20,))


def test_what_a_pass_begins_with() -> None:
    cases.check_embed(decode, "cpu", FP32, R=9, v=11, H=20)
    cases.check_norm_pair(decode, "cpu", FP32, R=5, H=24)
    cases.check_step_rows(decode, "cpu", slots=6, n=4, blocks=5)


@pytest.mark.parametrize(("n", "S"), [(7, 1), (3, 3), (14, 5)])
def test_around_latent_attention(n: int, S: int) -> None:
    cases.check_mla_step(
        decode, "cpu", FP32, n=n, S=S, h=3, k=12, v=10, C=40, r=8, Q=20, block_tokens=4, max_blocks=3
    )
