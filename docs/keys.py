"""Writes docs/keys.md, the table of every config key, from the schema: python -m docs.keys

A test compares the file with what this module writes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import bailing_mtp.config as schema
from bailing_mtp.config import RunConfig, Section, show
from bailing_mtp.config.support import OPTIONS
from recipes.compose import CONF, compose

TARGET = Path(__file__).with_suffix(".md")
VERBS = ("pretrain", "sft", "dpo", "grpo", "generate", "score", "convert", "doctor", "plot", "benchmark")
REQUIRED = "required"
KINDS = {str: "text", int: "integer", float: "number", bool: "`true`, `false`", dict: "mapping"}
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
EVERY_RUN = ("pretrain", "sft", "dpo", "grpo", "generate", "score", "benchmark")
TRAINING = EVERY_RUN[:4]
HEAD = """# Keys

Every key of every verb, generated from `bailing_mtp/config` by `python -m docs.keys`; a test fails when this file is
stale. Any of them can be given on the command line as `<key>=<value>`. The default is the schema's; where the file
`conf/<verb>.yaml` says otherwise, the verb is named behind it. Groups of keys are chosen by name, such as `model=tiny`
or `mtp=detached`: they set the keys of their section, and `experiment=<name>` those of several. A key that is unknown,
a value that is not allowed and a value that this machine cannot serve end the verb before anything is
loaded. "Training" is pretrain, sft, dpo and grpo; "all" is those with generate, score and benchmark.
"""
TITLES = {"": "Of the verb itself"}


@dataclass(frozen=True)
class Row:
    """One key as one or several verbs have it."""

    key: str
    allowed: str
    default: str
    meaning: str


def verb_config(verb: str) -> type[Section]:
    """The schema of a verb."""
    return getattr(schema, f"{verb.capitalize()}Config")


def rows_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Row]]:
    """(name of its section, row) of every key, in schema order."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from rows_of(kind, f"{prefix}{name}.")
            continue
        key = prefix + name
        default = REQUIRED if field.is_required() else _value(field.default)
        meaning = " ".join((field.description or "").split()) + _needed(key)
        yield prefix.rstrip("."), Row(key, _allowed(kind, field.metadata), default, meaning)


def _allowed(kind: Any, metadata: list[Any]) -> str:
    if get_origin(kind) is Annotated:
        return _allowed(get_args(kind)[0], [m for a in get_args(kind)[1:] for m in getattr(a, "metadata", [a])])
    if get_origin(kind) in (Union, UnionType):
        known = [_allowed(part, metadata) for part in get_args(kind) if part is not NoneType]
        return ", ".join([*known, "`null`"])
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is tuple:
        return f"list: {_allowed(get_args(kind)[0], [])}"
    if any(getattr(m, "pattern", None) for m in metadata):
        return "text, see meaning"
    bounds = [f"{sign} {getattr(m, name):g}" for m in metadata for name, sign in BOUNDS.items() if hasattr(m, name)]
    return " ".join([KINDS[get_origin(kind) or kind], *bounds[:1], *(f"and {bound}" for bound in bounds[1:])])


def _value(value: Any) -> str:
    text = str(list(value)) if isinstance(value, tuple) else value if isinstance(value, str) else show(value)
    return f"`{text}`"


def _names(verbs: list[str]) -> str:
    return {EVERY_RUN: "all", TRAINING: "training"}.get(tuple(verbs), ", ".join(verbs))


def _needed(key: str) -> str:
    """What a value needs of the machine."""
    notes = []
    for option in (option for option in OPTIONS if option.path == key):
        value = f"`{show(option.value).strip("'")}`"
        needs = [*(["a GPU"] if option.needs_gpu else []), *(f"`{module}`" for module in option.modules[:1])]
        notes.append(f"{value}: needs {' and '.join(needs)}.")
    return "".join(f" {note}" for note in notes)


def set_by_verb(verb: str) -> dict[str, str]:
    """Key -> value that conf/<verb>.yaml puts over the schema's default."""
    given = {"run_dir": REQUIRED} if issubclass(verb_config(verb), RunConfig) else {}
    plain = compose(verb_config(verb), verb, [], **given)
    assert plain is not None
    found = {}
    for _, row in rows_of(verb_config(verb)):
        node: Any = plain
        for name in row.key.split("."):
            node = node.get(name, REQUIRED) if isinstance(node, dict) else REQUIRED
        if node != REQUIRED and not isinstance(node, dict):
            value = _value(tuple(node) if isinstance(node, list) else node)
            if value != row.default:
                found[row.key] = value
    return found


def markdown() -> str:
    """The whole file."""
    sections: dict[str, dict[Row, list[str]]] = {}
    over = {verb: set_by_verb(verb) for verb in VERBS}
    for verb in VERBS:
        for section, row in rows_of(verb_config(verb)):
            sections.setdefault(section, {}).setdefault(row, []).append(verb)
    parts = [HEAD.rstrip()]
    for section, rows in sections.items():
        parts.append(_section(section, rows, over))
    return "\n\n".join(parts) + "\n"


def _section(name: str, rows: dict[Row, list[str]], over: dict[str, dict[str, str]]) -> str:
    order = {key: number for number, key in enumerate(dict.fromkeys(row.key for row in rows))}
    lines = [f"## {TITLES.get(name, f'`{name}`')}", ""]
    choices = sorted(path.stem for path in (CONF / name).glob("[!_]*.yaml")) if name else []
    if choices:
        lines += [f"Groups: {', '.join(f'`{name}={choice}`' for choice in choices)}.", ""]
    lines += ["| key | allowed | default | verbs | meaning |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: order[row.key]):
        # A reader of the page would take <run_dir> for a tag.
        meaning = row.meaning.replace("<", "&lt;")
        cells = (f"`{row.key}`", row.allowed, _default(row, rows[row], over), _names(rows[row]), meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _default(row: Row, verbs: list[str], over: dict[str, dict[str, str]]) -> str:
    by_value: dict[str, list[str]] = {}
    for verb in verbs:
        if row.key in over[verb]:
            by_value.setdefault(over[verb][row.key], []).append(verb)
    return "; ".join([row.default, *(f"{', '.join(names)}: {value}" for value, names in by_value.items())])


if __name__ == "__main__":
    TARGET.write_text(markdown(), encoding="ascii")
