"""The shell scripts, with stand-ins for the programs they start."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / "tests" / "slurm" / "run.sh", ROOT / ".ci" / "run"]


def program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)
    return path


def script(name: str, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    base = {"PATH": os.environ["PATH"], "HOME": str(cwd), "CUDA_VISIBLE_DEVICES": ""}
    command = [str(ROOT / "launch" / name), *arguments]
    return subprocess.run(
        command, cwd=cwd, env=base | environment, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def echo_python(tmp_path: Path) -> str:
    """An interpreter that only says how it was called."""
    body = 'echo "RUN_DIR=$RUN_DIR OMP=$OMP_NUM_THREADS PATH0=${PYTHONPATH%%:*}"\nprintf "<%s>" "$@"'
    return str(program(tmp_path / "echo_python", body))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_are_executable(path: Path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert path.name in ("env.sh", "lib.sh") or os.access(path, os.X_OK)


def test_torchrun_starts_one_run_for_all_ranks(tmp_path: Path, echo_python: str):
    result = script("torchrun.sh", "pretrain", "a=b c", cwd=tmp_path, NPROC="3", PYTHON=echo_python)
    first, arguments = result.stdout.splitlines()
    assert first.startswith("RUN_DIR=outputs/pretrain/20") and first.endswith(f"OMP=1 PATH0={ROOT}")
    expected = [f"{ROOT}/launch/elastic.py", "--standalone", "--nproc-per-node", "3"]
    assert arguments == "".join(f"<{word}>" for word in [*expected, "-m", "recipes.pretrain", "a=b c"])


def test_torchrun_takes_run_dir_and_gpus_as_given(tmp_path: Path, echo_python: str):
    given = {"PYTHON": echo_python, "RUN_DIR": "mine", "CUDA_VISIBLE_DEVICES": "4,5", "OMP_NUM_THREADS": "2"}
    result = script("torchrun.sh", "score", cwd=tmp_path, **given)
    assert "RUN_DIR=mine OMP=2" in result.stdout and "<--nproc-per-node><2>" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "error: usage: launch/torchrun.sh <verb> [overrides]; verbs: "),
        (["train"], {}, "error: verb: 'train' is unknown; use one of: "),
        (
            ["pretrain"],
            {},
            "error: NPROC: no GPU is visible; give the number of CPU processes, such as NPROC=2",
        ),
        (["pretrain"], {"NPROC": "two"}, "error: NPROC: 'two' is not a number of processes"),
        (["pretrain"], {"PYTHON": "/no/python"}, "error: PYTHON: '/no/python' does not run"),
    ],
)
def test_torchrun_refuses(tmp_path: Path, echo_python: str, arguments: list, environment: dict, message: str):
    result = script("torchrun.sh", *arguments, cwd=tmp_path, **{"PYTHON": echo_python} | environment)
    assert result.returncode == 1 and result.stdout == "" and result.stderr.startswith(message)


def test_the_demo_hands_each_checkpoint_on(tmp_path: Path):
    """A stand-in for the interpreter leaves what a training verb leaves."""
    body = """echo "$@" >>calls
for word in "$@"; do case "$word" in run_dir=*) dir="${word#run_dir=}" ;; esac; done
mkdir -p "$dir/checkpoints/step_7" && echo step_7 >"$dir/checkpoints/latest" """
    python = str(program(tmp_path / "python", body))
    result = script("demo.sh", "new", cwd=tmp_path, PYTHON=python)
    assert result.returncode == 0, result.stderr
    *calls, last = (tmp_path / "calls").read_text().splitlines()
    assert last.startswith(f"{ROOT}/launch/demo_summary.py new ")
    assert ["-m recipes.pretrain experiment=demo run_dir=new/pretrain" in calls[0], len(calls)] == [True, 4]
    assert "experiment=demo_grpo checkpoint.load=new/pretrain/checkpoints/step_7 run_dir=new/grpo" in calls[1]
    for drafts, call in zip((0, 2), calls[2:], strict=True):
        assert "recipes.generate checkpoint.load=new/grpo/checkpoints/step_7" in call and "--nproc-per-node 2" in call
        assert f"rollout.speculative_tokens={drafts} " in call
    again = script("demo.sh", "new", cwd=tmp_path, PYTHON=python)
    assert again.returncode == 1 and again.stderr == "error: new: is there already; name another directory, or none\n"


def test_the_demo_stops_where_a_step_fails(tmp_path: Path):
    python = str(program(tmp_path / "python", "echo >>calls; exit 3"))
    assert script("demo.sh", cwd=tmp_path, PYTHON=python).returncode == 3
    assert (tmp_path / "calls").read_text() == "\n"


def test_the_summary_says_what_was_measured(tmp_path: Path):
    names = ("valid/reward_mean", "valid/reward_standard_error", "valid/reward_solved", "valid/accept_length")
    rows = [(0, 0.25, 0.02, 0.24, 2.5), (10, None, None, None, None), (20, 0.5, 0.03, 0.49, 2.25)]
    lines = [{"step": step, **dict(zip(names, values, strict=True))} for step, *values in rows]
    files = {
        "grpo/metrics.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
        "grpo/data/held_out.jsonl": "{}\n" * 9,
    }
    for k, seconds, steps, length in ((0, 6.0, 40, 1.0), (2, 5.0, 16, 2.2)):
        values = {"samples": 72, "seconds": seconds, "tokens_per_second": 1e4 / seconds, "steps": steps}
        files[f"generate_k{k}/samples.jsonl.stats.json"] = json.dumps(values | {"accept_length": length})
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, str(ROOT / "launch" / "demo_summary.py"), str(tmp_path), "367"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    shown = [" ".join(line.split()) for line in out.splitlines()]
    for line in (
        f"== demo: 6m07s, everything in {tmp_path}", "9 held-out prompts, sampled before grpo after 20 steps",
        "reward, mean +- standard error 0.250 +- 0.020 0.500 +- 0.030", "solved 0.240 0.490",
        "accept length, k=2 (plain = 1) 2.500 2.250", "72 rollouts of the trained policy plain k=2",
        "seconds 6.00 5.00", "decode steps 40 16", "accept length 1.000 2.200",
        "Time without speculation / with it: 1.20; decode steps: 2.50.",
    ):  # fmt: skip
        assert line in shown, line


def test_find_python_passes_over_a_shim_that_refuses(tmp_path: Path):
    for name in ("python3.12", "python3", "pyenv"):
        program(tmp_path / "bin" / name, "exit 127")
    versions = tmp_path / ".pyenv" / "versions"
    program(versions / "3.12.9" / "bin" / "python", "exit 1")
    program(versions / "3.12.10" / "bin" / "python", "echo /found/python")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    found = script("find_python.sh", cwd=tmp_path, PATH=path)
    assert (found.returncode, found.stdout) == (0, "/found/python\n")
    program(versions / "3.12.10" / "bin" / "python", "exit 1")
    lost = script("find_python.sh", cwd=tmp_path, PATH=path)
    assert lost.returncode == 1 and lost.stdout == "" and "pyenv install 3.12" in lost.stderr


def test_find_python_takes_a_python_that_works(tmp_path: Path):
    program(tmp_path / "bin" / "python3.12", f'exec {sys.executable} "$@"')
    found = script("find_python.sh", cwd=tmp_path, PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert Path(found.stdout.strip()).exists()


def test_install_does_nothing_twice_and_follows_the_checkout(tmp_path: Path):
    venv = tmp_path / "venv"
    program(venv / "bin" / "python", f'printf "<%s>" "$@" >> {tmp_path}/calls')
    digest = hashlib.sha256((ROOT / "setup.cfg").read_bytes()).hexdigest()
    (venv / ".dependencies").write_text(digest + "\n")
    (venv / ".source").write_text(f"{ROOT}\n")
    result = script("install.sh", str(venv), cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not (tmp_path / "calls").exists()

    (venv / ".source").write_text("/another/checkout\n")
    assert script("install.sh", str(venv), cwd=tmp_path).returncode == 0
    assert f"<--no-deps><-e><{ROOT}>" in (tmp_path / "calls").read_text()
    assert (venv / ".source").read_text() == f"{ROOT}\n"


def test_install_tells_size_time_and_space_first_and_stamps_last(tmp_path: Path):
    venv = tmp_path / "venv"
    fake = 'if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; else exit ${PIP_RC:-0}; fi'
    program(tmp_path / "bin" / "python3.12", f'[ "$1" = -c ] && echo {tmp_path}/bin/fake || exit 1')
    program(tmp_path / "bin" / "fake", fake)
    program(tmp_path / "bin" / "df", 'echo header; echo "disk 0 0 ${FREE_KB:-99999999} 1% /"')
    path = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}

    broken = script("install.sh", str(venv), cwd=tmp_path, PIP_RC="1", **path)
    assert broken.returncode == 1 and not (venv / ".dependencies").exists()
    full = script("install.sh", str(venv), cwd=tmp_path, FREE_KB="5000000", **path)
    assert full.returncode == 1 and "4 GB free, at least 8 GB needed" in full.stderr
    good = script("install.sh", str(venv), cwd=tmp_path, **path)
    assert good.returncode == 0 and good.stdout.startswith(f"Installing into {venv}: about 5.5 GB")
    assert "3 to 6 minutes; free there: 95 GB" in good.stdout and (venv / ".dependencies").exists()


def test_make_without_a_target_explains():
    result = subprocess.run(["make", "-C", str(ROOT)], capture_output=True, text=True, check=True)
    for target in ("install", "demo", "test", "test-gpu", "lint"):
        assert f"make {target} " in result.stdout


def test_make_with_python_installs_nothing():
    command = ["make", "-n", "-C", str(ROOT), "test-gpu", "PYTHON=python3"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "python3 -m pytest -m gpu" in result.stdout and "install" not in result.stdout
