"""launch/env.sh lists every environment variable that recipes and launch scripts read or set."""

import ast
import re
from pathlib import Path

from tests.house.source import sources

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
# The shell's own, and those of the installation.
OTHERS = {"BASH_SOURCE", "SECONDS", "HOME", "HELP", "PATH", "PYENV_ROOT", "PYTHONPATH"}


def read_by_python() -> set[str]:
    found = set()
    for source in sources("recipes", "launch"):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
                found.add(ast.literal_eval(node.args[0]))
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
                found.add(ast.literal_eval(node.slice))
    return found


def read_by_shell() -> set[str]:
    texts = [path.read_text() for path in [*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"]]
    return {name for text in texts for name in re.findall(r"\$\{?([A-Z][A-Z_]+)\b", text)} - OTHERS


def test_every_variable_is_listed():
    listed = set(re.findall(r"\b[A-Z][A-Z_]{3,}\b", (LAUNCH / "env.sh").read_text()))
    python, shell = read_by_python(), read_by_shell()
    assert {"RUN_DIR", "RUN_JOB", "LOCAL_RANK", "STOP_MARK"} <= python and {"NPROC", "SLURM_NODEID"} <= shell
    assert not (python | shell) - listed
