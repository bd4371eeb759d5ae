"""Generate the reference pages of docs/: strategies, verbs, settings, presets, passes, messages, versions, API.

    python -m autograph_rewrite.tools.dev.reference [verbs.md]      prints a page, or the names of all

They are generated whenever the site is built, so they are never out of date.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import autograph_rewrite
from autograph_rewrite import errors
from autograph_rewrite.config import cross_field_checks
from autograph_rewrite.config.config import Config
from autograph_rewrite.config.cross_field_checks import CHECKS, IN_JOB
from autograph_rewrite.ir.traversal import grouped
from autograph_rewrite.passes.pass_pipeline import PIPELINE
from autograph_rewrite.strategies import STRATEGIES
from autograph_rewrite.tools.cli import EPILOG, VERBS, options_of, parser_of


def pages() -> dict[str, str]:
    """Return the text of every page, by its file name below docs/reference."""
    return {
        "strategies.md": strategies_page(),
        "verbs.md": verbs_page(),
        "settings.md": settings_page(),
        "presets.md": presets_page(),
        "passes.md": passes_page(),
        "messages.md": messages_page(),
        "compatibility.md": compatibility_page(),
        "api.md": api_page(),
    }


# The public names, each as a directive from which mkdocstrings makes its signature and docstring.


HEAD = """\
# API

`import autograph_rewrite as ar`: the public names. Importing the package does not import TensorFlow; the first use of
a name that needs it does.

"""
_ERRORS = f"{autograph_rewrite.__name__}.errors"


def api_page() -> str:
    """Return the page of the public names: functions, then classes, then errors."""
    names = sorted(autograph_rewrite.__all__, key=lambda name: (name.endswith("Error"), name[0].isupper(), name))
    return HEAD + "\n".join(f"::: {_where(name)}.{name}\n" for name in names)


def _where(name: str) -> str:
    """Return the module that a public name is loaded from."""
    module = autograph_rewrite._LAZY.get(name)
    return _ERRORS if module is None else f"{autograph_rewrite.__name__}.{module}"


# The settings of a configuration, the shipped presets, and impossible combinations, read from models and checks.


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
    """Return the section on impossible combinations."""
    refused = [
        template(part) for node in ast.walk(ast.parse(inspect.getsource(cross_field_checks))) for part in _said(node)
    ]
    rows = [(", ".join(f"`{key}`" for key in sorted(keys)), (check.__doc__ or "").strip()) for keys, check in CHECKS]
    rows += [("`cluster`", (check.__doc__ or "").strip()) for check in IN_JOB]
    return (
        LIMITS_HEAD
        + "".join(f"- {cell(one)}\n" for one in refused if one is not None)
        + "\n## What must fit together\n\n"
        + table(("settings", "what holds, or it is an error at its line"), *rows)
    )


def _said(node: ast.AST) -> list[ast.expr]:
    """Return the message of a refusal, the second element of a yielded tuple, in a list."""
    return node.value.elts[1:] if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple) else []


def _section(name: str, idea: str, schema: Mapping[str, Any]) -> str:
    rows = [(f"`{key}`", _values(one), _default(one), _words(one)) for key, one in schema["properties"].items()]
    said = f"{idea}\n\n" if idea else ""
    return f"## {name}\n\n{said}" + table(("key", "value", "default", "meaning"), *rows)


def _values(schema: Mapping[str, Any]) -> str:
    """Return the allowed values of a field, as text; a link for another section."""
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


# The versions that work together, read from setup.py and constraints.txt.


COMPATIBILITY_HEAD = """\
# Versions

What the package asks for, from `setup.py`, and what `make` installs and tests, from `constraints.txt`. An upper bound
is the first version that nobody has tried: graphs of another TensorFlow may hold ops and attributes without a rule.

"""
TAIL = """
Linux only. The checks of every change (`.ci/run`) use one Python, that of the machine; `make PYTHON=python3.10 test` is
how to try another. [TensorFlow and Keras](../versions.md) says what was run with each release, on CPUs; see
[accelerators](../accelerators.md) for GPUs.
The site itself (`make docs`) needs Python 3.11 or later with the versions in `constraints.txt`.
"""


def compatibility_page() -> str:
    """Return the page of the versions."""
    tested = _constraints()
    asked = _requirements()
    rows = [(f"`{name}`", f"`{wanted or 'any'}`", ", ".join(tested.get(name, ("",)))) for name, wanted in asked.items()]
    return COMPATIBILITY_HEAD + table(("package", "asked for", "tested with"), *rows) + TAIL


def _constraints() -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        pinned = re.match(r"([\w.-]+)==([^;\s]+)(?:; python_version (\S+) \"(\S+)\")?", line)
        if pinned is not None:
            where = f" (Python {pinned[3]} {pinned[4]})" if pinned[3] else ""
            found.setdefault(pinned[1].lower(), []).append(pinned[2] + where)
    return found


def _requirements() -> dict[str, str]:
    """Return the requirements in setup.py: Python, TensorFlow, and the package's dependencies."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    call = next(node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node.func) == "setup")
    keywords = {one.arg: one.value for one in call.keywords}
    extras = keywords["extras_require"]
    assert isinstance(extras, ast.Dict)
    wanted = {"python": str(ast.literal_eval(keywords["python_requires"]))}
    texts = [text for value in extras.values[:2] for text in ast.literal_eval(value)]
    for text in [*texts, *ast.literal_eval(keywords["install_requires"])]:
        name, bounds = re.fullmatch(r"([\w.-]+)(.*)", text).groups()  # type: ignore[union-attr]
        wanted[name] = bounds
    return wanted


# Every error message of the package, with `...` for filled-in parts, read from the source.


MESSAGES_HEAD = """\
# Messages

Every error that this package raises, from the places that raise it; `...` is filled in. Search this page for a few
words of yours. [Troubleshooting](../troubleshooting.md) explains the common ones.

"""


class Message(NamedTuple):
    """An error: its class, message, hint, and the module that raises it."""

    kind: str
    text: str
    hint: str
    module: str


def messages() -> Iterator[Message]:
    """Yield every error whose message is a literal in the call of its class."""
    kinds = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, Exception)}
    for module, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args and _called(node.func) in kinds:
                text = template(node.args[0])
                if text is not None and text.strip("."):
                    hints = [template(one.value) for one in node.keywords if one.arg == "hint"]
                    yield Message(_called(node.func), text, next(filter(None, hints), ""), module)


def messages_page() -> str:
    """Return the page of all messages, a section for each class."""
    found = sorted(set(messages()))
    parts = [MESSAGES_HEAD]
    for kind in sorted({one.kind for one in found}):
        about = (getattr(errors, kind).__doc__ or "").partition("\n")[0]
        parts.append(f"## {kind}\n\n{about}\n\n")
        parts += [_line(one) for one in found if one.kind == kind]
        parts.append("\n")
    return "".join(parts)


def _line(message: Message) -> str:
    text = _code(message.text)
    hint = f"<br>hint {_code(message.hint)}" if message.hint else ""
    return f"- {text}{hint} ({message.module})\n"


def _code(text: str) -> str:
    shown = cell(text).replace("\\|", "|")
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"


def _called(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


# The passes in their order, each with its first sentence.


PASSES_HEAD = """\
# Passes

A rewrite runs these passes on the folded graph, in this order, and verifies the graph after each. A pass runs only
where there is something for it to do. `autograph-rewrite opt --list` prints the same list, `opt --stop-after PASS` the
graph after one of them, and [architecture](../architecture.md#the-way-of-a-rewrite) says how they work together.
[A pass of your own](../writing_passes.md) can go after any of them.

"""


def passes_page() -> str:
    """Return the page of all passes."""
    return PASSES_HEAD + table(("pass", "what it does"), *((f"`{one.name}`", one.summary) for one in PIPELINE))


# The strategy builders of the registry, each with its first sentence and the presets that use it.


STRATEGIES_HEAD = """\
# Strategies: the list

What `strategy.name` takes, from the registry of builders. `path/to/file.py:Class` names
[one of your own](../writing_strategies.md).

"""
PAGES = {
    "AllReduce": "all_reduce",
    "PS": "parameter_server",
    "PSLoadBalancing": "parameter_server",
    "PartitionedPS": "partitioned",
    "UnevenPartitionedPS": "partitioned",
    "PartitionedAR": "partitioned",
    "RandomAxisPartitionAR": "partitioned",
    "Parallax": "parallax",
    "FSDP": "partitioned",
    "Pipeline": "pipeline",
    "Auto": "auto",
}


def strategies_page() -> str:
    """Return the page of the strategies."""
    files = sorted((ROOT / "configs").glob("*.yaml"))
    used = grouped((Config.load(file).strategy.name, f"[`{file.stem}`](presets.md#{file.stem})") for file in files)
    what = sentences()
    rows = [
        (f"[`{name}`](../strategy/{PAGES[name]}.md)", what[name], " ".join(used.get(name, ()))) for name in STRATEGIES
    ]
    return STRATEGIES_HEAD + table(("name", "what it does", "presets"), *rows)


def sentences() -> dict[str, str]:
    """Return the first paragraph of each builder's docstring, by class name."""
    found: dict[str, str] = {}
    for module in ("__init__.py", "auto.py"):
        tree = ast.parse((ROOT / "strategies" / module).read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = (ast.get_docstring(node) or "").partition("\n\n")[0]
    return found


# The verbs of the command line with every option, read from their argument parsers.


VERBS_HEAD = """\
# Verbs and options

`autograph-rewrite VERB ...`: every verb, from the argument parsers of the command. Every verb takes `--json`, which
prints JSON on standard output, and `--help`. {epilog}.

"""


_EVERYWHERE = ("help", "json")


def verbs_page() -> str:
    """Return the page of the verbs."""
    rows = [("verb", "does"), *((f"[`{verb}`](#{verb})", does) for verb, does in VERBS.items())]
    return "\n".join([VERBS_HEAD.format(epilog=_sentence(EPILOG)) + table(*rows), *(_verb(verb) for verb in VERBS)])


def _verb(verb: str) -> str:
    own = (action for action in options_of(parser_of(verb)) if action.dest not in _EVERYWHERE)
    rows = [_option(action) for action in own if action.help != argparse.SUPPRESS]
    return f"## {verb}\n\n{_sentence(VERBS[verb])}.\n\n" + (table(("option", "meaning"), *rows) if rows else "")


def _option(action: argparse.Action) -> tuple[str, str]:
    """Return an option, as it is typed, and its help."""
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if isinstance(value, tuple):
        value = " ".join(value)
    names = ", ".join(action.option_strings)
    typed = f"{names} {value}".strip() if names else str(value or action.dest)
    if action.choices is not None and action.metavar is None:
        typed = f"{names} {'/'.join(map(str, action.choices))}".strip()
    filled = {**vars(action), "prog": "autograph-rewrite"}
    return f"`{typed}`", (action.help or "").replace("<", "&lt;") % filled


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


# Helpers for the pages: the sources of the package as syntax trees, and Markdown tables.


ROOT = Path(__file__).parents[2]
_TOPS = ("autograph_rewrite", "strategies", "tools")


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield every module of the package, by its path below the checkout, in order."""
    for path in sorted(path for top in _TOPS for path in (ROOT / top).rglob("*.py")):
        if not path.name.endswith("_pb2.py"):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def template(node: ast.expr) -> str | None:
    """Return a text literal with `...` for filled-in parts; None if the node is no text literal."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(template(value) or "..." for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (template(left) or "...") + (template(right) or "...")
        case ast.IfExp(body=body):
            return template(body)
    return None


def cell(text: object) -> str:
    """Return a text as one cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(*rows: tuple[object, ...]) -> str:
    """Return a Markdown table whose first row is its head."""
    head, *body = rows
    lines = [head, tuple("---" for _ in head), *body]
    return "\n".join("| " + " | ".join(cell(value) for value in line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    made = pages()
    print("\n".join(made[name] for name in sys.argv[1:]) or "\n".join(made))
