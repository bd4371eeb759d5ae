"""Read YAML with the line of each key, so that faults are reported as `file:line`.

The data are plain dicts, lists and scalars as from `yaml.safe_load`, except that keys stay text (`on` is no boolean),
dates stay text, and a repeated key is a fault.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import yaml

from autograph_rewrite.diagnostics.faults import FileFault, failure
from autograph_rewrite.diagnostics.files import read_whole
from autograph_rewrite.diagnostics.limits import in_time, limit
from autograph_rewrite.errors import RewriteError

KeyPath = tuple[str | int, ...]


class Finding(NamedTuple):
    """A fault at a path of a file, and a hint."""

    path: KeyPath
    message: str
    hint: str | None = None


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml where it was built: ten times faster
_TAG = "tag:yaml.org,2002:"
_TEXT = (f"{_TAG}str", f"{_TAG}timestamp")
_MAX_ALIASED = 100_000  # values that aliases repeat: nested aliases can expand ten lines to a gigabyte


@dataclass(frozen=True)
class Source:
    """The file that data were read from, with the lines of its keys, counted from 1.

    All sources compare equal, so that equal configurations from two files are equal.
    """

    name: str = field(default="config", compare=False)
    lines: Mapping[KeyPath, int] = field(default_factory=dict, compare=False, repr=False)

    def at(self, path: KeyPath) -> str:
        """Return `file:line` of `path`, or of the nearest enclosing key; only the name if no lines are known."""
        line = self._line(path)
        return f"{self.name}:{line}" if line else self.name

    def fault(self, path: KeyPath, message: str, hint: str | None = None) -> FileFault:
        """Return a fault at `path`.

        Args:
            path: keys and indices from the top of the file.
        """
        return FileFault(self.at(path), message, hint, self._line(path))

    def also(self, path: KeyPath, written: KeyPath) -> Source:
        """Return a source in which `path` has the line of another key.

        Args:
            path: a key that is not in the file.
            written: the key from which its value follows.
        """
        known = {path: self.lines[written]} if written in self.lines else {}
        return replace(self, lines=MappingProxyType({**self.lines, **known}))

    def _line(self, path: KeyPath) -> int:
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 0)


@dataclass(frozen=True)
class Located:
    """Data, the places of its parts in the file, and the YAML faults."""

    data: object
    source: Source
    faults: tuple[FileFault, ...] = ()


def dotted(path: KeyPath) -> str:
    """Return `variables[0].match` for ("variables", 0, "match")."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def load_yaml(path: str | os.PathLike[str], *, error: type[RewriteError]) -> Located:
    """Read a YAML (or JSON) file.

    Raises:
        RewriteError: of type `error`: the file does not exist, is no YAML, or takes too long to read.
    """
    shown = os.fspath(path)
    return in_time(lambda: _load(path, shown, error), name=shown, error=error)


def _load(path: str | os.PathLike[str], shown: str, error: type[RewriteError]) -> Located:
    try:
        data = read_whole(path, "text")
    except FileNotFoundError:
        raise error(f"there is no file '{shown}'", hint="check the path") from None
    except OSError as problem:
        raise error(f"cannot read '{shown}': {problem.strerror}", hint="check the path") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise failure([FileFault(f"{shown}:{line}", "this is not UTF-8 text")], error=error) from None
    return parse_yaml(text, file=shown, error=error)


def parse_yaml(text: str, *, file: str, error: type[RewriteError]) -> Located:
    """Read YAML text; `file` is the name in places and messages.

    Raises:
        RewriteError: of type `error`: the text is no YAML, or is empty.
    """
    try:
        if _is_too_deep(text):  # libyaml composes recursively, in C: many brackets would crash the process
            raise error(f"{file}: this is nested too deeply to be read")
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.YAMLError as problem:
        raise failure([_syntax(file, problem)], error=error) from None
    if root is None:
        raise error(f"{file}: the file is empty", hint="write {} to leave everything at its default")
    reader = _Reader(file, error)
    data = reader.read(root, ())
    return Located(data, Source(file, MappingProxyType(reader.lines)), tuple(reader.faults))


def _is_too_deep(text: str) -> bool:
    """Return whether collections are nested more deeply than the limit."""
    depth, most = 0, limit("depth")
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > most:
            return True
    return False


def _syntax(file: str, problem: yaml.YAMLError) -> FileFault:
    """Return the fault of a YAML error."""
    if isinstance(problem, yaml.MarkedYAMLError) and problem.problem_mark is not None:
        said = " ".join(part for part in (problem.context, problem.problem) if part)
        return FileFault(f"{file}:{problem.problem_mark.line + 1}", f"this is not YAML: {said}")
    return FileFault(f"{file}:1", f"this is not YAML: {str(problem).splitlines()[0]}")


class _Reader:
    """Turns YAML nodes into data and records lines and faults; raises `error` for too deep or too many values."""

    def __init__(self, file: str, error: type[RewriteError]) -> None:
        self.file = file
        self._error = error
        self.lines: dict[KeyPath, int] = {}
        self.faults: list[FileFault] = []
        self._open: set[int] = set()  # the collections around the current node: an alias to one is a cycle
        self._read: set[int] = set()
        self._aliased = 0
        self._most_depth = limit("depth")
        scalars = yaml.constructor.SafeConstructor()
        self._scalars = {
            f"{_TAG}int": scalars.construct_yaml_int,
            f"{_TAG}float": scalars.construct_yaml_float,
            f"{_TAG}bool": scalars.construct_yaml_bool,
            f"{_TAG}null": scalars.construct_yaml_null,
        }

    def read(self, node: yaml.Node, path: KeyPath) -> object:
        """Return the data of the node at `path`."""
        if len(path) > self._most_depth:  # aliases of aliases nest, too
            raise self._error(f"{self.file}: this is nested too deeply to be read")
        if id(node) in self._read:
            self._aliased += 1
            if self._aliased > _MAX_ALIASED:
                raise self._error(f"{self.file}: its aliases (*name) write more than {_MAX_ALIASED:,} values")
        self._read.add(id(node))
        self.lines.setdefault(path, _line(node))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if id(node) in self._open:
            self._fault(node, "an alias in here stands for what is around it")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.read(item, (*path, i)) for i, item in enumerate(node.value)]
            return self._mapping(node, path)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.Node, path: KeyPath) -> dict[str, object]:
        data: dict[str, object] = {}
        for key, value in self._pairs(node):
            here = (*path, key.value)
            if key.value in data:
                self._fault(key, f"the key '{key.value}' stands here twice (first in line {self.lines[here]})")
                continue
            self.lines[here] = _line(key)
            data[key.value] = self.read(value, here)
        return data

    def _pairs(self, node: yaml.Node) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._fault(key, "a key must be a word")
            elif key.tag == "tag:yaml.org,2002:merge":
                self._fault(key, "merge keys (<<) are not supported; write the keys out")
            else:
                yield key, value

    def _scalar(self, node: yaml.ScalarNode) -> object:
        if node.tag in _TEXT:
            return str(node.value)
        construct = self._scalars.get(node.tag)
        if construct is None:
            self._fault(node, f"the tag {node.tag.removeprefix(_TAG)} is not supported")
            return None
        try:
            return construct(node)
        except (ValueError, KeyError):  # `!!int x`, `!!bool maybe`
            self._fault(node, f"'{node.value}' cannot be read")
            return None

    def _fault(self, node: yaml.Node, message: str) -> None:
        line = _line(node)
        self.faults.append(FileFault(f"{self.file}:{line}", message, line=line))


def _line(node: yaml.Node) -> int:
    line: int = node.start_mark.line
    return line + 1
