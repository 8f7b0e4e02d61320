"""Settings of fla's kernels: those that ship, where they were measured."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipes.kernel_settings import fla_settings, prepare_kernels


def _config(kda: str = "torch", kernels: str = "triton") -> SimpleNamespace:
    return SimpleNamespace(
        model=SimpleNamespace(kda=kda, dtype="bf16"), rollout=SimpleNamespace(kernels=kernels)
    )


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name in ("FLA_CACHE_MODE", "FLA_CONFIG_DIR"):
        # Set, then deleted: so that what a test sets is gone after it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return SimpleNamespace(device=torch.device("cuda:0"), is_writer=True)


def test_only_where_they_were_measured():
    folder = Path(fla_settings((9, 0), "bf16")["FLA_CONFIG_DIR"])
    for name in ("chunk_kda_fwd_kernel_inter_solve_fused", "l2norm_fwd_kernel", "kda_gate_chunk_cumsum_vector_kernel"):
        assert json.loads((folder / f"{name}.json").read_text())["default_config"], name
    assert fla_settings((8, 0), "bf16") == fla_settings((9, 0), "fp32") == {}


def test_every_verb_gets_them_and_says_so(hopper, capsys):
    prepare_kernels(_config(), hopper)
    assert os.environ["FLA_CACHE_MODE"] == "full" and os.environ["FLA_CONFIG_DIR"].endswith("fla_h200")
    assert "settings from fla_h200" in capsys.readouterr().out


def test_nothing_where_fla_is_not_used(hopper, capsys):
    prepare_kernels(_config(kernels="torch"), hopper)
    assert "FLA_CACHE_MODE" not in os.environ and not capsys.readouterr().out


def test_the_environment_wins(hopper, monkeypatch):
    monkeypatch.setenv("FLA_CACHE_MODE", "strict")
    prepare_kernels(_config(kda="fla", kernels="torch"), hopper)
    assert os.environ["FLA_CACHE_MODE"] == "strict"
