"""Delta attention of a step: the kernel equals its twin in outputs and in everything it keeps."""

import pytest
import torch

from bailing_mtp.kernels.triton import decode, kda_verify
from tests.kernels.decode_cases import check_kda_verify


@pytest.mark.parametrize("fused_programs", [128, 0])
@pytest.mark.parametrize(
    ("h", "D", "V", "lower_bound", "taps"),
    [(2, 16, 8, -5.0, 4), (1, 64, 64, None, 4)],
)
def test_steps_of_changing_width(
    h: int,
    D: int,
    V: int,
    lower_bound: float | None,
    taps: int,
    fused_programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kda_verify, "FUSED_PROGRAMS", fused_programs)
    check_kda_verify(
        decode, "cpu", torch.float32, rows=3, slots=4, tokens=(1, 4, 2), h=h, D=D, V=V,
        lower_bound=lower_bound, taps=taps,
    )  # fmt: skip


def test_three_heads_and_two_taps() -> None:
    check_kda_verify(decode, "cpu", torch.float32, rows=1, slots=2, tokens=(3, 1), h=3, D=32, V=16, taps=2)


def test_head_sizes_must_be_powers_of_two() -> None:
    with pytest.raises(ValueError, match="24"):
        check_kda_verify(decode, "cpu", torch.float32, rows=1, slots=1, tokens=(1,), h=1, D=24, V=16)
