"""The whole recipe but for the GPU's clock: its table, its file, and its checks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {(3, 1), (3, 3)}
BESIDE_THE_SET = ("log_sum_exps", "draw")
"""Kernels that a case calls itself, not through its kernel set."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("benchmark")


@pytest.fixture(scope="module")
def printed(run_dir: Path) -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.benchmark.interpreted", str(run_dir)],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout.splitlines()


def test_every_kernel_is_its_twin_at_every_shape(run_dir: Path, printed: list[str]):
    content = json.loads((run_dir / "benchmark.json").read_text())
    assert content["device"] == "none" and content["failed"] == []
    shapes: dict[str, set[tuple[int, int]]] = {}
    for figure in content["kernels"]:
        shapes.setdefault(figure["kernel"], set()).add((figure["rows"], figure["fed_tokens"]))
        assert figure["us"] == pytest.approx(3.0) and figure["error"] <= 1e-4
        assert figure["floor_us"] == pytest.approx(figure["floor_bytes"] / 4.3e6, rel=1e-2)
        assert figure["ratio"] == pytest.approx(3.0 / figure["floor_us"])
    for name in ("kda in", "kda out", "shared up", "shared down"):
        assert shapes.pop(f"linear {name}") == {(3, 1)}
    assert shapes.pop("draw") == {(3, 1)} and shapes.pop("draw residual") == {(3, 3)}
    assert set(shapes) == {
        "kda_verify", "mla_verify", "write_latents", "apply_rope query", "apply_rope key", "rms_norm",
        "add_rms_norm", "swiglu dense", "swiglu shared", "route", "experts", "log_sum_exps", "linears mla in",
        "cache_latents", "absorb_queries", "gated_values", "embed", "norm_pair",
    }  # fmt: skip
    assert all(where == SHAPES for where in shapes.values())
    assert len(content["passes"]) == 3 + 6


def test_the_table_has_a_line_for_every_figure(run_dir: Path, printed: list[str]):
    content = json.loads((run_dir / "benchmark.json").read_text())
    kernels, passes = (next(i for i, line in enumerate(printed) if line.startswith(x)) for x in ("kernel", "pass"))
    assert passes - kernels - 1 == len(content["kernels"])
    assert printed[kernels + 1].startswith("kda_verify               3  1      3.00 ")
    assert printed[passes + 1].startswith("trunk                    3  1     0.003")
    assert printed[-2].startswith(f"benchmark: {len(content['kernels'])} kernel shapes, 9 passes, written to ")


def test_kernels_that_are_off_are_found(printed: list[str]):
    checked = [row for row in json.loads(printed[-1]) if not row[0].startswith(BESIDE_THE_SET)]
    assert len(checked) == 21 and not [row for row in checked if row[1] <= row[2]]
