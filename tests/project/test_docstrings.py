"""Functions of the public API say what each of their parameters is, with shapes and units."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

import autograph_rewrite as ar
from tests.project.test_layout import parse
from tests.support.paths import ROOT

MANY = 3
_SECTION = re.compile(r"^(?:Args|Attributes):\n((?: .*\n|\n)*)", re.MULTILINE)
_ITEM = re.compile(r"^    \*{0,2}(\w+): ", re.MULTILINE)


class Signature(NamedTuple):
    """A public function or method: where it is, its parameters, and those that its docstring names."""

    where: str
    parameters: frozenset[str]
    documented: frozenset[str]


def parameters_of(node: ast.FunctionDef, *, method: bool) -> frozenset[str]:
    arguments = node.args
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names += [one.arg for one in (arguments.vararg, arguments.kwarg) if one is not None]
    return frozenset(names[1:] if method and "staticmethod" not in map(ast.unparse, node.decorator_list) else names)


def named_in(docstring: str | None) -> frozenset[str]:
    """Return the names that the sections on arguments list."""
    return frozenset(name for body in _SECTION.findall(f"{docstring}\n") for name in _ITEM.findall(body))


def signatures(module: ast.Module, where: str) -> Iterator[Signature]:
    """Yield the public functions of a module, and the public methods and constructors of its public classes.

    What a constructor takes may stand in the docstring of its class.
    """
    for node in module.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and (not inner.name.startswith("_") or inner.name == "__init__"):
                    of_class = ast.get_docstring(node) if inner.name == "__init__" else ""
                    named = named_in(ast.get_docstring(inner)) | named_in(of_class)
                    yield Signature(f"{where}: {node.name}.{inner.name}", parameters_of(inner, method=True), named)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            named = named_in(ast.get_docstring(node))
            yield Signature(f"{where}: {node.name}", parameters_of(node, method=False), named)


def undocumented(found: Signature) -> frozenset[str]:
    """Return the parameters that nothing is said of, where there are so many that a reader needs it."""
    return found.parameters - found.documented if len(found.parameters) >= MANY else frozenset()


def test_every_parameter_of_the_public_api_is_explained() -> None:
    """Elsewhere `Args:` stands where it says more than name and type do."""
    every = []
    for name, module in ar._LAZY.items():
        path = ROOT / "autograph_rewrite" / f"{module.replace('.', '/')}.py"
        where = f"{module}: {name}"
        found = signatures(parse(path), module)
        every += [one for one in found if one.where == where or one.where.startswith(f"{where}.")]
    assert len(every) > len(ar._LAZY)
    assert {one.where: sorted(undocumented(one)) for one in every if undocumented(one)} == {}


def test_a_parameter_that_nothing_is_said_of_is_found() -> None:
    source = '''
class Box:
    """A box.

    Attributes:
        width: in cm.
    """

    def __init__(self, width, height, depth): ...

    def put(self, what, *where, **how):
        """Put.

        Args:
            what: a thing.
            **how: names.

        Raises:
            where: never.
        """

    def _put(self, a, b, c): ...


def short(a, b): ...
'''
    found = {one.where: undocumented(one) for one in signatures(ast.parse(source), "x")}
    assert found == {"x: Box.__init__": {"height", "depth"}, "x: Box.put": {"where"}, "x: short": set()}
