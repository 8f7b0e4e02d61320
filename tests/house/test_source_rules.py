"""Habits that a reader can rely on: no hidden state, no swallowed errors, nothing left for later."""

import ast
import io
import re
import tokenize

from tests.house.source import Source, sources

BROAD = {"Exception", "BaseException"}
BANNED_COMMENT = re.compile(r"\b(TODO|FIXME|XXX|HACK|noqa)\b|(type|pyright):\s*ignore")


def breaches(source: Source) -> list[str]:
    lines = []

    def note(line: int, what: str) -> None:
        lines.append(f"{source.path}:{line}: {what}")

    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            note(node.lineno, "global statement")
        elif isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or ast.unparse(kind) in BROAD for kind in kinds):
                note(node.lineno, "broad except")
        elif isinstance(node, ast.Raise) and node.exc is not None:
            if ast.unparse(node.exc).startswith("NotImplementedError"):
                note(node.lineno, "stub")
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and BANNED_COMMENT.search(token.string):
            note(token.start[0], f"comment {token.string!r}")
    if not source.text.isascii():
        note(0, "is not ASCII")
    return lines


def test_source_rules():
    assert not [line for source in sources() for line in breaches(source)]


def test_library_modules_say_what_they_are():
    shipped = [source for source in sources("bailing_mtp", "recipes") if source.text.strip()]
    assert not [source.path for source in shipped if not ast.get_docstring(source.tree)]


def test_the_test_sees_what_it_should():
    def found(text: str) -> list[str]:
        return breaches(Source("a.py", text, ast.parse(text)))

    assert found("def f():\n    global x")
    assert found("try:\n    f()\nexcept:\n    g()")
    assert found("try:\n    f()\nexcept (KeyError, Exception):\n    g()")
    assert found("raise NotImplementedError('later')")
    assert found("x = 1  # " + "TODO later")
    assert found("x = 1  # " + "noqa: E501")
    assert found("x = '\u00e9'")
    assert not found("try:\n    f()\nexcept KeyError:\n    g()")
