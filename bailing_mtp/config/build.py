"""From a plain dict to a frozen config, and from pydantic's errors to lines that name keys."""

import difflib
import re
from typing import Annotated, Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from .errors import ConfigError
from .section import Section

# What this project leaves out on purpose, by the key that another trainer would have for it.
_OUT_OF_SCOPE = {
    "parallel.pp": "pipeline parallelism",
    "parallel.cp": "context parallelism",
    "parallel.etp": "tensor parallelism inside an expert",
    "model.lora": "LoRA",
    "rollout.tree": "tree drafts",
}

_KINDS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "finite_number": "a finite number",
    "string_too_short": "a text that is not empty",
    "too_short": "a list that is not empty",
}
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}


def build_config[SectionT: Section](cls: type[SectionT], plain: dict[str, Any]) -> SectionT:
    """Validate `plain` (nested dicts, lists and scalars) as `cls`.

    Raises ConfigError with one line per mistake: key path, value, what is allowed.
    """
    try:
        return cls.model_validate(plain)
    except ValidationError as error:
        problems = [_problem(cls, detail) for detail in error.errors(include_url=False)]
        raise ConfigError(*problems) from None


def schema_defaults(cls: type[Section], required: Any) -> dict[str, Any]:
    """Every key of `cls` as a nested plain dict: its default, or `required` where the schema has none."""
    plain: dict[str, Any] = {}
    for name, field in cls.model_fields.items():
        section = _section_of(field)
        if section is not None:
            plain[name] = schema_defaults(section, required)
        elif field.is_required():
            plain[name] = required
        else:
            default = field.default
            plain[name] = list(default) if isinstance(default, tuple) else default
    return plain


def key_paths(cls: type[Section]) -> tuple[str, ...]:
    """Dotted path of every section and key of `cls`, in schema order."""
    paths: list[str] = []
    for name, field in cls.model_fields.items():
        paths.append(name)
        section = _section_of(field)
        if section is not None:
            paths.extend(f"{name}.{path}" for path in key_paths(section))
    return tuple(paths)


def text_keys(cls: type[Section]) -> frozenset[str]:
    """Dotted paths of the keys of `cls` that hold one free text, such as paths; a list of texts is none."""
    keys = set()
    for path in key_paths(cls):
        field = _field_at(cls, tuple(path.split(".")))
        if get_origin(field.annotation) is tuple:
            continue
        if any(_is_text(kind) for kind in get_args(field.annotation) or (field.annotation,)):
            keys.add(path)
    return frozenset(keys)


def unknown_key(cls: type[Section], path: str) -> str:
    """The line that says `path` is no key of `cls`, with the nearest key or the allowed ones."""
    if path in _OUT_OF_SCOPE:
        return f"{path}: {_OUT_OF_SCOPE[path]} is not part of this project"
    known = key_paths(cls)
    parent, _, leaf = path.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == parent}
    near = [key for key in known if key.rpartition(".")[2] == leaf]
    near = near or [siblings[name] for name in difflib.get_close_matches(leaf, siblings, n=1)]
    if near:
        return f"{path}: unknown key; did you mean {near[0]}?"
    return f"{path}: unknown key; allowed here: {', '.join(siblings.values() or cls.model_fields)}"


def show(value: Any) -> str:
    """A value as a user would type it in YAML, cut to 80 characters."""
    names = {None: "null", True: "true", False: "false"}
    text = names[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _is_text(kind: Any) -> bool:
    # pydantic strips Annotated[str, ...] from a field, but not inside a union.
    return kind is str or (get_origin(kind) is Annotated and get_args(kind)[0] is str)


def _section_of(field: FieldInfo) -> type[Section] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _field_at(cls: type[Section], location: tuple[int | str, ...]) -> FieldInfo | None:
    field, section = None, cls
    for part in location:
        if section is None or part not in section.model_fields:
            return field
        field = section.model_fields[part]
        section = _section_of(field)
    return field


def _problem(cls: type[Section], detail: dict[str, Any]) -> str:
    """One line for one of pydantic's error records."""
    kind, location, context = detail["type"], detail["loc"], detail.get("ctx", {})
    path = ".".join(str(part) for part in location)
    if kind == "value_error":
        error = context["error"]
        return str(error) if isinstance(error, ConfigError) else f"{path}: {error}"
    if kind == "extra_forbidden":
        return unknown_key(cls, path)
    field = _field_at(cls, location)
    if kind == "missing":
        return f"{path}: is required and has no default{_meaning(field)}"
    value = show(detail["input"])
    if kind == "literal_error":
        return f"{path}: {value} is not allowed; use one of {_literals(context['expected'])}"
    allowed = _allowed(kind, context, detail["msg"])
    if field is not None and type(None) in get_args(field.annotation):
        allowed += ", or null"
    return f"{path}: {value} is not allowed; must be {allowed}{_meaning(field)}"


def _allowed(kind: str, context: dict[str, Any], message: str) -> str:
    if kind in _KINDS:
        return _KINDS[kind]
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return f"{words} {context[bound]:g}"
    if kind == "string_pattern_mismatch":
        return "one of the forms in its description"
    return f"as pydantic asks: {message}"


def _literals(expected: str) -> str:
    return ", ".join(re.findall(r"'([^']*)'", expected))


def _meaning(field: FieldInfo | None) -> str:
    description = " ".join((field.description or "").split()) if field is not None else ""
    return f" ({description.rstrip('.')})" if description else ""
