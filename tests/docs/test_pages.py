"""The pages under docs/ and the README say what is so: keys, messages, links, commands, figures."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

import docs.keys
from bailing_mtp.config import RunConfig, build_config
from recipes.compose import CONF, compose

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STARTS = re.compile(r"(?:\w+=\S+ )*(?:python3? -m recipes\.|launch/torchrun\.sh |.*launch/slurm\.sbatch )(?=\w)")
HOLE = "\0"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """Ids that a page's headings get, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_verb_has_its_page():
    verbs = {path.stem for path in CONF.glob("*.yaml")}
    assert verbs == set(docs.keys.VERBS) == {path.stem for path in (ROOT / "docs" / "recipes").glob("*.md")}


def test_the_table_of_keys_is_fresh():
    assert docs.keys.TARGET.read_text(encoding="ascii") == docs.keys.markdown(), "stale: run python -m docs.keys"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path):
    assert page.read_text(encoding="utf-8").isascii()
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@cache
def source_texts() -> list[str]:
    """Every text of the source; what an f-string fills in is a hole."""
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "launch").iterdir() if file.is_file()]
    texts = [re.sub(r"'?\$\{?\w+\}?'?", HOLE, text) for text in texts]
    for place in ("bailing_mtp", "recipes"):
        for file in (ROOT / place).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else HOLE for part in node.values]
                    texts.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return texts


def quoted_messages(page: str) -> list[str]:
    """The code spans in the first column of the tables: messages, `<...>` where they differ."""
    cells = re.findall(r"^\| (.*?) \| ", page, re.MULTILINE)
    return [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]


def is_in_source(message: str) -> bool:
    """Whether some text of the source begins so, each `<...>` standing for anything."""
    fixed = [part for part in re.split(r"<[^>]*>", message) if re.search(r"\w{2}", part)]
    pattern = re.compile(".*?".join(re.escape(part.strip()) for part in fixed), re.DOTALL)
    return bool(fixed) and any(pattern.search(text) for text in source_texts())


def test_quoted_messages_exist():
    messages = quoted_messages((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    assert len(messages) > 60
    assert not [message for message in messages if not is_in_source(message)]
    assert not is_in_source("data.path: <path> does not exit")


def commands(page: Path) -> list[list[str]]:
    """[verb, overrides...] of the whole commands of a page."""
    found = []
    for block in FENCE.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            begin = STARTS.match(line)
            if begin and "..." not in line:
                found.append(shlex.split(re.sub(r"<[^>]*>", "x", line[begin.end() :]), comments=True))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_compose(page: Path):
    for verb, *overrides in commands(page):
        config_cls = docs.keys.verb_config(verb)
        given = {"run_dir": "out"} if issubclass(config_cls, RunConfig) else {}
        plain = compose(config_cls, verb, overrides, **given)
        if "--cfg" not in overrides:
            build_config(config_cls, plain)


def rows_under(page: str, heading: str) -> list[list[str]]:
    """Cells of the first table under a heading, without its head."""
    lines = page.partition(f"# {heading}\n")[2].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|--"))
    table = []
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def test_tokens_per_second_follow_from_step_times():
    """README: rows x accept length / step time, of the step times in docs/speculative_decoding.md."""
    steps = rows_under((ROOT / "docs" / "speculative_decoding.md").read_text(encoding="utf-8"), "Step time on one H200")
    expected = []
    for rows, plain, drafted, length, *_ in steps:
        n, plain_ms, drafted_ms = int(rows), float(plain), float(drafted)
        assert float(length) == pytest.approx(drafted_ms / plain_ms, abs=0.005)
        rates = [n / plain_ms, *(n * kept / drafted_ms for kept in (1, 2, 2.5, 3))]
        expected.append([rows, *(f"{1000 * rate:,.0f}" for rate in rates), length])
    shown = rows_under((ROOT / "README.md").read_text(encoding="utf-8"), "Tokens per second against accept length")
    assert [row[:7] for row in shown] == expected
