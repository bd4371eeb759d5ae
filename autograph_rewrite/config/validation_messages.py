"""pydantic's findings in the user's words: the key, what it must be, what it is, what was meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from autograph_rewrite.diagnostics.faults import SHOWN, Fault, did_you_mean, either
from autograph_rewrite.diagnostics.located_yaml import KeyPath, Source, dotted
from autograph_rewrite.errors import RewriteError

_MUST_BE = {
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a text",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list, as in [a, b]",
    "model_type": "must be a mapping (key: value)",
    "model_attributes_type": "must be a mapping (key: value)",
}


def faults_of(error: ValidationError, model: type[BaseModel], source: Source) -> list[Fault]:
    """One fault per finding of pydantic.

    Args:
        error: what pydantic raised.
        model: the section that was validated.
        source: the file, which knows the line of each key.
    """
    known: dict[tuple[str, ...], str] = {}

    def meant(path: KeyPath) -> str | None:
        keys = tuple(key for key in path if isinstance(key, str))  # a mistake in one item of a list is one in all
        if keys not in known and len(known) > SHOWN:
            return None  # nobody will see it, and looking takes time
        if keys not in known:
            known[keys] = _meant(path, model)
        return known[keys]

    return [_fault(dict(finding), meant, source) for finding in error.errors()]


def _fault(finding: dict[str, Any], meant: Callable[[KeyPath], str | None], source: Source) -> Fault:
    """Translate a finding; pydantic's are dicts of many shapes, hence Any."""
    path: KeyPath = tuple(finding["loc"])
    kind, context, given = finding["type"], finding.get("ctx", {}), _quoted(finding["input"])
    name = dotted(path) or "the configuration"
    match kind:
        case "extra_forbidden":
            return source.fault(path, f"unknown key '{path[-1]}'{_inside(path)}", meant(path))
        case "missing":
            return source.fault(path[:-1], f"the key '{path[-1]}' is missing{_inside(path)}")
        case "literal_error":
            known = re.findall(r"'([^']*)'", context["expected"])
            hint = did_you_mean(str(finding["input"]), known) if isinstance(finding["input"], str) else None
            close = hint if hint and hint.startswith("did you mean") else None
            return source.fault(path, f"{name} must be {either(known)}, not {given}", close)
        case "greater_than_equal":
            return source.fault(path, f"{name} must be at least {context['ge']:g}, not {given}")
        case "less_than_equal":
            return source.fault(path, f"{name} must be at most {context['le']:g}, not {given}")
        case "invalid_key":
            return source.fault(path[:-1], f"a key must be a text, not {path[-1]!r}{_inside(path)}")
        case "greater_than":
            return source.fault(path, f"{name} must be more than {context['gt']:g}, not {given}")
        case "value_error" if isinstance(context["error"], RewriteError):
            return source.fault(path, f"{name}: {context['error'].problem}", context["error"].hint)
        case "value_error":
            return source.fault(path, f"{name} {context['error']}")
        case _ if kind in _MUST_BE:
            return source.fault(path, f"{name} {_MUST_BE[kind]}, not {given}")
    return source.fault(path, f"{name}: {finding['msg']}")


def _inside(path: KeyPath) -> str:
    return f" in {dotted(path[:-1])}" if path[:-1] else ""


def _quoted(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _meant(path: KeyPath, model: type[BaseModel]) -> str:
    """The closest valid key, or the section to which a key that is right elsewhere belongs."""
    word = str(path[-1])
    here = _section(path[:-1], model)
    known = list(here.model_fields) if here else []
    hint = did_you_mean(word, known)
    if hint.startswith("did you mean"):
        return hint
    homes = [home for home, section in _sections(model) if word in section.model_fields]
    if not homes:
        return hint
    if not homes[0]:
        return f"'{word}' belongs at the top, outside of {dotted(path[:-1])}"
    return f"did you mean '{homes[0]}.{word}'?"


def _section(path: KeyPath, model: type[BaseModel]) -> type[BaseModel] | None:
    """The class of the section at `path`."""
    for key in path:
        if isinstance(key, int):
            continue  # the items of a list have the list's class
        field = model.model_fields.get(key)
        inner = _model_in(field.annotation) if field else None
        if inner is None:
            return None
        model = inner
    return model


def _sections(model: type[BaseModel], home: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section with the path of its keys, the outer ones first."""
    yield home, model
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is not None:
            yield from _sections(inner, f"{home}.{name}" if home else name)


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The model class in `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(part) for part in get_args(annotation))
    return next((model for model in found if model is not None), None)
