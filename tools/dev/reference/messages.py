"""Every error message of the package, with `...` for what is filled in, read from the places that raise them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from autograph_rewrite import errors
from autograph_rewrite.tools.dev.reference.sources import cell, modules, template

HEAD = """\
# Messages

Every error that this package raises, from the places that raise it; `...` is filled in. Search this page for a few
words of yours. [Troubleshooting](../troubleshooting.md) explains the common ones.

"""


class Message(NamedTuple):
    """An error: its class, its words, what to do, and the module that raises it."""

    kind: str
    text: str
    hint: str
    module: str


def messages() -> Iterator[Message]:
    """Yield every error whose words stand in the call that makes it."""
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
    parts = [HEAD]
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
