"""What the fields of sections mean: the strings behind them, read from their source when somebody asks for a schema.

    timeout_seconds: Positive = 300.0
    "How long ..."                            ──►   schema["properties"]["timeout_seconds"]["description"]

Pydantic can read them when a class is made, and searches all modules of the process for each: a third of a second.
"""

from __future__ import annotations

import ast
import functools
import inspect
from itertools import pairwise
from typing import Any

from pydantic import BaseModel


def add_descriptions(schema: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Return a JSON schema with the descriptions of all fields.

    Args:
        schema: of the model.
        model: its sections stand in modules of this package.
    """
    sections = {found.__name__: found for found in _sections(model)}
    schemas = {model.__name__: schema, **schema.get("$defs", {})}
    for name, section in sections.items():
        texts = _descriptions(section)
        for field, found in schemas.get(name, {}).get("properties", {}).items():
            if field in texts:
                found["description"] = texts[field]
    return schema


def _sections(model: type[BaseModel]) -> set[type[BaseModel]]:
    """Return a model and all models of its fields."""
    found: set[type[BaseModel]] = set()
    pending: list[Any] = [model]
    while pending:
        one = pending.pop()
        pending += getattr(one, "__args__", ())
        if isinstance(one, type) and issubclass(one, BaseModel) and one not in found:
            found.add(one)
            pending += [field.annotation for field in one.model_fields.values()]
    return found


def _descriptions(section: type[BaseModel]) -> dict[str, str]:
    module = inspect.getmodule(section)
    assert module is not None
    return _of_module(module.__file__ or "").get(section.__name__, {})


@functools.cache
def _of_module(path: str) -> dict[str, dict[str, str]]:
    """Return the descriptions of fields by class and field."""
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    return {node.name: _of_class(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _of_class(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for field, text in pairwise(node.body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[field.target.id] = inspect.cleandoc(str(text.value.value))
    return found
