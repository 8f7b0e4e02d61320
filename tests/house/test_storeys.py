"""Imports only go down the storeys; configuration machinery stays in the recipes."""

import ast

from tests.house.source import LIBRARY, Source, imported_modules, sources

# What each package of the library may import from the others, beside errors, which is open to all.
GROUND: frozenset[str] = frozenset()
MAY_IMPORT = {
    "errors": GROUND,
    "kernels": GROUND,
    "contracts": GROUND,
    "config": GROUND,
    "log": GROUND,
    "parallel": {"config", "log"},
    "model": {"parallel", "kernels", "contracts", "config", "log"},
    "data": {"parallel", "kernels", "contracts", "config", "log"},
    "losses": {"kernels", "parallel", "contracts", "config", "log"},
    "rl": {"kernels", "parallel", "contracts", "config", "log"},
    "weights": {"model", "parallel", "contracts", "config", "log"},
    "training": {"model", "losses", "parallel", "contracts", "config", "log"},
    "rollout": {"weights", "kernels", "parallel", "contracts", "config", "log"},
    "__init__": GROUND,
}
ONLY_IN_RECIPES = {"hydra", "omegaconf", "wandb"}


def upward_imports(source: Source) -> list[str]:
    allowed = MAY_IMPORT[source.package] | {source.package, "errors"}
    lines = []
    for line, name in imported_modules(source):
        parts = name.split(".")
        inside = parts[0] == LIBRARY and (len(parts) == 1 or parts[1] not in allowed)
        if inside or parts[0] in ("recipes", "launch", "tests"):
            lines.append(f"{source.path}:{line}: imports {name}")
    return lines


def recipe_business(source: Source) -> list[str]:
    lines = [
        f"{source.path}:{line}: imports {name}"
        for line, name in imported_modules(source)
        if name.split(".")[0] in ONLY_IN_RECIPES or name in ("os.environ", "os.getenv", "os.putenv")
    ]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
            lines.append(f"{source.path}:{node.lineno}: reads the environment")
    return lines


def test_every_package_has_a_storey():
    assert not {source.package for source in sources(LIBRARY)} - set(MAY_IMPORT)


def test_imports_only_go_down():
    assert not [line for source in sources(LIBRARY) for line in upward_imports(source)]


def test_hydra_wandb_and_environment_only_in_recipes():
    assert not [line for source in sources(LIBRARY) for line in recipe_business(source)]


def test_training_and_rollout_never_meet_and_model_never_sees_weights():
    assert "rollout" not in MAY_IMPORT["training"] and "training" not in MAY_IMPORT["rollout"]
    assert "weights" not in MAY_IMPORT["model"]


def test_the_test_sees_what_it_should():
    def bad(path: str, text: str) -> list[str]:
        source = Source(path, text, ast.parse(text))
        return upward_imports(source) + recipe_business(source)

    assert bad("bailing_mtp/config/a.py", "from ..parallel import setup")
    assert bad("bailing_mtp/config/a.py", "from bailing_mtp import contracts")
    assert bad("bailing_mtp/model/sub/a.py", "from ...weights.view import x")
    assert bad("bailing_mtp/model/a.py", "def f():\n    import bailing_mtp.training.step")
    assert bad("bailing_mtp/training/a.py", "from bailing_mtp.rollout import engine")
    assert bad("bailing_mtp/model/a.py", "from omegaconf import OmegaConf")
    assert bad("bailing_mtp/model/a.py", "import os\nos.environ['A']")
    assert bad("bailing_mtp/model/a.py", "from os import environ")
    assert bad("bailing_mtp/model/a.py", "from recipes import common")
    assert not bad("bailing_mtp/model/sub/a.py", "from ...kernels import kda\nfrom ..kda import f")
