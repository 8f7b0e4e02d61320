"""Small files, small functions."""

import ast

from tests.house.source import Source, sources

FILE_LINES = 400
RECIPE_LINES = 150
FUNCTION_LINES = 60
TRITON_LINES = 150


def is_triton(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Decorated with triton.jit, with or without arguments."""
    names = [ast.unparse(decorator).partition("(")[0] for decorator in function.decorator_list]
    return any(name in ("triton.jit", "jit") for name in names)


def long_functions(source: Source) -> list[str]:
    lines = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            limit = TRITON_LINES if is_triton(node) else FUNCTION_LINES
            if length > limit:
                lines.append(f"{source.path}:{node.lineno}: {node.name} has {length} lines, limit {limit}")
    return lines


def test_files():
    too_long = []
    for source in sources():
        limit = RECIPE_LINES if source.package == "recipes" else FILE_LINES
        length = len(source.text.splitlines())
        if length > limit:
            too_long.append(f"{source.path}: {length} lines, limit {limit}")
    assert not too_long


def test_functions():
    assert not [line for source in sources() for line in long_functions(source)]


def test_the_test_sees_what_it_should():
    body = "\n".join(["    x = 1"] * 61)

    def found(head: str) -> list[str]:
        text = f"{head}def f():\n{body}"
        return long_functions(Source("a.py", text, ast.parse(text)))

    assert found("") and not found("@triton.jit\n") and not found("@triton.jit(repr=name)\n")
