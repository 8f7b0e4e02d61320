"""Latent attention of a step: tiles, split sequences, block tables, and rows past the context limit."""

import pytest
import torch

from bailing_mtp.kernels.triton import decode, mla_verify
from tests.kernels.decode_cases import check_apply_rope, check_mla_verify, check_write_latents

FP32 = torch.float32


@pytest.mark.parametrize(("S", "h"), [(1, 2), (3, 7), (5, 4)])
def test_attention_of_scattered_sequences(S: int, h: int) -> None:
    check_mla_verify(
        decode, "cpu", FP32, positions=(0, 1, 7, 33, 70), S=S, h=h, C=24, r=8, block_tokens=8, max_blocks=10
    )


def test_rows_past_their_table() -> None:
    check_mla_verify(
        decode, "cpu", FP32, positions=(30, 31, 40), S=3, h=2, C=16, r=4, block_tokens=8, max_blocks=4
    )


def test_many_rows_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_verify, "PROGRAMS", 1)
    check_mla_verify(
        decode, "cpu", FP32, positions=(5, 40), S=2, h=3, C=32, r=8, block_tokens=16, max_blocks=3
    )


@pytest.mark.parametrize(("x", "block_tokens"), [(20, 4), (64, 16)])
def test_writes(x: int, block_tokens: int) -> None:
    check_write_latents(decode, "cpu", FP32, T=23, x=x, block_tokens=block_tokens, max_blocks=3)


@pytest.mark.parametrize(("h", "r"), [(1, 8), (5, 12)])
def test_rotation(h: int, r: int) -> None:
    check_apply_rope(decode, "cpu", FP32, T=9, h=h, r=r)
