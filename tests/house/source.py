"""The project's own Python files, parsed once for the house tests."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "bailing_mtp"
PLACES = (LIBRARY, "recipes", "launch", "tests")


@dataclass(frozen=True)
class Source:
    """One file: `path` relative to the root with forward slashes, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """First level below the library (config, model, ...), or the top-level folder outside it."""
        parts = self.path.removesuffix(".py").split("/")
        return parts[1] if parts[0] == LIBRARY else parts[0]


@cache
def sources(*places: str) -> tuple[Source, ...]:
    """Every Python file under `places`, or under all of the project's."""
    found = []
    for place in places or PLACES:
        for file in sorted((ROOT / place).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            found.append(Source(file.relative_to(ROOT).as_posix(), text, ast.parse(text)))
    return tuple(found)


def imported_modules(source: Source) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of everything imported, anywhere in the file; relative imports resolved.

    `from a import b` gives `a.b`: b may be a module.
    """
    package = source.path.removesuffix(".py").split("/")[:-1]
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            found += [(node.lineno, ".".join([*base, alias.name])) for alias in node.names]
    return found
