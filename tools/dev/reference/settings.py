"""The settings of a configuration, the shipped presets, and what cannot be combined, read from models and checks."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Mapping
from typing import Any

from autograph_rewrite.config import unsupported
from autograph_rewrite.config.config import Config
from autograph_rewrite.config.cross_field_checks import CHECKS, IN_JOB
from autograph_rewrite.tools.dev.reference.sources import ROOT, cell, table, template

SETTINGS_HEAD = """\
# Settings

Every key of a configuration, from the models that check it. A configuration is a YAML file, a mapping, or the name of a
[preset](presets.md); [config.schema.json](../config.schema.json) is the same as a JSON schema, for editors. Unknown
keys and wrong values are errors, all reported at once, each with its line.

"""
PRESETS_HEAD = """\
# Presets

Configurations that are installed with the package. Their name does wherever a file is wanted:
`ar.distribute(model, "fsdp")`, `--config fsdp`. Copy one to change it.

"""
LIMITS_HEAD = """\
## What cannot be combined

Each setting may be right by itself, and the configuration refused all the same. This list comes from the checks that
refuse it; [Known limits](../limits.md) lists what the rewrite itself cannot do yet. Not in this version are

"""


def settings_page() -> str:
    """Return the page of all settings."""
    schema = Config.json_schema()
    parts = [SETTINGS_HEAD + _section("Top level", "", schema)]
    parts += [_section(name, one.get("description", ""), one) for name, one in sorted(schema["$defs"].items())]
    return "\n".join([*parts, _limits()])


def presets_page() -> str:
    """Return the page of the configurations that are shipped."""
    files = sorted((ROOT / "configs").glob("*.yaml"))
    rows: list[tuple[object, ...]] = [("preset", "strategy", "what it is for")]
    texts = []
    for file in files:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if "yaml-language-server" not in line]
        idea = " ".join(line[2:] for line in lines[: next(i for i, line in enumerate(lines) if line[:1] != "#")])
        rows.append((f"[`{file.stem}`](#{file.stem})", f"`{Config.load(file).strategy.name}`", idea))
        texts.append(f"## {file.stem}\n\n```yaml\n" + "\n".join(lines).rstrip() + "\n```\n")
    return "\n".join([PRESETS_HEAD + table(*rows), *texts])


def _limits() -> str:
    """Return the section on what cannot be combined."""
    refused = [template(part) for node in ast.walk(ast.parse(inspect.getsource(unsupported))) for part in _said(node)]
    rows = [(_keys(keys), (check.__doc__ or "").strip()) for keys, check in CHECKS]
    rows += [("`cluster`", (check.__doc__ or "").strip()) for check in IN_JOB]
    return (
        LIMITS_HEAD
        + "".join(f"- {cell(one)}\n" for one in refused if one is not None)
        + "\n## What must fit together\n\n"
        + table(("settings", "what holds, or it is an error at its line"), *rows)
    )


def _said(node: ast.AST) -> list[ast.expr]:
    """Return the words of a refusal: the second of what `yield` gives."""
    return node.value.elts[1:] if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple) else []


def _keys(keys: frozenset[str]) -> str:
    return ", ".join(f"`{key}`" for key in sorted(keys))


def _section(name: str, idea: str, schema: Mapping[str, Any]) -> str:
    rows = [(f"`{key}`", _values(one), _default(one), _words(one)) for key, one in schema["properties"].items()]
    said = f"{idea}\n\n" if idea else ""
    return f"## {name}\n\n{said}" + table(("key", "value", "default", "meaning"), *rows)


def _values(schema: Mapping[str, Any]) -> str:
    """Return what a field takes, in words: `one of` for names, a link for another section."""
    match schema:
        case {"enum": names}:
            return ", ".join(f"`{one}`" for one in names)
        case {"anyOf": ways} | {"oneOf": ways} | {"allOf": ways}:
            return " or ".join(dict.fromkeys(_values(way) for way in ways if way.get("type") != "null"))
        case {"$ref": target}:
            name = target.rpartition("/")[2]
            return f"[{name}](#{name.lower()})"
        case {"type": "array", "prefixItems": items}:
            return "[" + ", ".join(_values(one) for one in items) + "]"
        case {"type": "array", "items": items}:
            return f"list of {_values(items)}"
    bounds = [f"{sign} {schema[key]}" for key, sign in _BOUNDS.items() if key in schema]
    return " ".join(
        [_TYPES.get(schema.get("type", ""), str(schema.get("type", "anything"))), ", ".join(bounds)]
    ).strip()


_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_TYPES = {"string": "text", "boolean": "true, false"}


def _default(schema: Mapping[str, Any]) -> str:
    if "default" not in schema:
        return "(needed)"
    default = schema["default"]
    if default is None or default == [] or isinstance(default, dict):
        return ""
    return f"`{json.dumps(default)}`"


def _words(schema: Mapping[str, Any]) -> str:
    return cell(schema.get("description", "")).replace("\\|", "|").replace("<", "&lt;")
