"""The shell scripts, with stand-ins for the programs they start."""

import hashlib
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
