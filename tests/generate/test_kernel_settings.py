"""Settings of fla's kernels: those that ship, where they were measured, and how more of them are added."""

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import triton

from recipes.kernel_settings import FOLDER, fla_settings, prepare_kernels
from tests.gpu import tune_fla
from tests.model.test_presets import preset


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


@pytest.fixture(scope="module")
def fla_cache() -> ModuleType:
    """fla's reader of such files by itself: the whole package takes seconds."""
    (root,) = importlib.util.find_spec("fla").submodule_search_locations
    spec = importlib.util.spec_from_file_location("fla_cache_alone", Path(root) / "ops" / "utils" / "cache.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _tuned(channels: int, block: int) -> tune_fla.Tuned:
    key = (channels, 4, *("torch.bfloat16",) * 3, *("torch.int64",) * 2)
    configs = [triton.Config({"BD": size}, num_warps=8) for size in (block, 2 * block, 4 * block)]
    times = (0.1, 0.25, float("inf"))
    return tune_fla.Tuned("causal_conv1d_fwd_kernel", key, configs[0], dict(zip(configs, times, strict=True)))


def test_keys_have_the_names_that_fla_gives_them(fla_cache: ModuleType):
    shipped = [json.loads(file.read_text()) for file in (FOLDER / "fla_h200").glob("*.json")]
    entries = [pair for settings in shipped for pair in settings["autotune_entries"].items()]
    assert len(entries) > 14
    for name, entry in entries:
        key = entry["autotune_key"]
        assert name == tune_fla.key_hash(key) == fla_cache.AutotuneKey.key_hash(tuple(key))


def test_what_was_tuned_joins_what_is_there(fla_cache: ModuleType, tmp_path: Path):
    narrow, wide, again = _tuned(3072, 16), _tuned(6144, 32), _tuned(6144, 64)
    tune_fla.write(tmp_path / "new", [wide])
    tune_fla.write(tmp_path / "new", [narrow, again])
    file = tmp_path / "new" / "causal_conv1d_fwd_kernel.json"
    assert list(json.loads(file.read_text())) == ["kernel_name", "triton_version", "autotune_entries", "default_config"]
    settings = fla_cache.KernelConfigFile.from_file(file)
    assert settings.kernel_name == wide.kernel and settings.triton_version == triton.__version__
    assert len(settings.autotune_entries) == 2 and settings.default_config["kwargs"] == {"BD": 32}
    for tuned in (narrow, again):
        entry = settings.lookup_exact(fla_cache.AutotuneKey(tuned.key))
        assert entry["config"] == {
            "kwargs": tuned.config.kwargs, "num_warps": 8, "num_ctas": 1, "num_stages": 3, "maxnreg": None,
        }  # fmt: skip
    assert wide.line().startswith("causal_conv1d_fwd_kernel [6144, 4,") and "BD: 32, num_warps: 8" in wide.line()
    assert wide.line().endswith(", 0.1000 ms, slowest 0.2500 ms")


def test_settings_of_another_triton_stay_alone(tmp_path: Path):
    other = tmp_path / "causal_conv1d_fwd_kernel.json"
    other.write_text(json.dumps(tune_fla.merged(None, [_tuned(3072, 16)]) | {"triton_version": "2.0"}))
    before = other.read_text()
    with pytest.raises(ValueError, match="causal_conv1d_fwd_kernel was tuned with triton 2.0"):
        tune_fla.write(tmp_path, [_tuned(6144, 32)])
    assert other.read_text() == before


def test_the_short_convolution_has_the_channels_of_the_model():
    arch = preset("ling3_tiny")
    assert [tune_fla.channels_of(arch, tp) for tp in (1, 2)] == [6144, 3072]
