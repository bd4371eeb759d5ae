r"""Writes attribute values as text that can be read back: the braces of the full printed form.

    b"0\x01" ──write──► float32 ──read──► b"0\x01"        float32[2,1][0.5, 1.0]   [1, 2]   "text"   @body{T=int32}

A large constant is a string in base 64, or one element where the graph states one for all: float32[1000,32] splat 0.1
Values that no readable text reproduces exactly are written as `raw"..."`, the AttrValue in base 64.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.mesh import PerInstance
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import FunctionName, Shape, decode, decode_tensor, encode, is_splat, splat_element
from autograph_rewrite.ir.types.protos import proto

LONGEST = 64  # elements of a tensor that are written one by one; longer tensors are one string in base 64
_KINDS = {b"\x12": "string", b"\x18": "int", b"%": "float", b"(": "bool", b"0": "type", b":": "shape", b"B": "tensor",
          b"R": "func"}  # fmt: skip
_TRUTHS = ("true", "false")
SHORTENED = "what was shortened in print cannot be read: print with --full"
_TOKEN = re.compile(
    r'\s*(?:(?P<coded>raw|b64)?(?P<string>")'
    r"|(?P<number>[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|inf\b|nan\b))"
    r"|@(?P<function>[\w.\-/>]+)|(?P<word>[A-Za-z_]\w*)|(?P<mark>\.\.\.|[\[\](){},=|?:#<]))"
)
_JSON = json.JSONDecoder()


def write(raw: bytes | PerInstance) -> str:
    """Return an attribute value as text from which `read` makes the same value."""
    if isinstance(raw, PerInstance):
        return f"each({' | '.join(write(one) for one in raw.raws)})"
    try:
        text = _written(raw)
        if text is not None and are_alike(Literals(text).value(None), raw):
            return text
    except (GraphError, ValueError, TypeError, KeyError, OverflowError):
        pass
    return f'raw"{base64.b64encode(raw).decode()}"'


def _written(raw: bytes) -> str | None:
    kind = _KINDS.get(raw[:1])
    if kind == "tensor":
        return _tensor_text(decode_tensor(proto("AttrValue").FromString(raw).tensor))
    value = decode(raw)
    if isinstance(value, tuple) and kind is None:
        return f"[{', '.join(_scalar(one) for one in value)}]"
    return _scalar(value, kind)


def _scalar(value: Any, kind: str | None = None) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case bytes():
            return json.dumps(value.decode(), ensure_ascii=True)
        case FunctionName():
            attrs = ", ".join(f"{key}={write(raw)}" for key, raw in value.attrs)
            return f"@{value.name}" + (f"{{{attrs}}}" if attrs else "")
        case float():
            return str(np.float32(value))  # attributes are single precision
        case int():
            return dtypes.dtype_name(value) if kind == "type" else str(value)
        case tuple() | None:
            return f"shape{shape_text(value)}"
    raise ValueError(value)


def shape_text(shape: Shape | None) -> str:
    """Return `[?,16]`, or `[...]` for an unknown rank."""
    return "[...]" if shape is None else f"[{','.join('?' if dim is None else str(dim) for dim in shape)}]"


def _tensor_text(value: Any) -> str | None:
    if not isinstance(value, np.ndarray):
        shape = tuple(dim.size for dim in value.tensor_shape.dim)
        if value.dtype != dtypes.STRING or len(value.string_val) != int(np.prod(shape)):
            return None
        return f"string{shape_text(shape)}[{', '.join(json.dumps(one.decode()) for one in value.string_val)}]"
    head = f"{value.dtype.name}{shape_text(value.shape)}"
    coded = value.dtype.kind == "c"
    if is_splat(value) and (value.size > LONGEST or coded):
        element = splat_element(value)
        return f"{head} splat {_base64_text(element) if coded else _element_text(element)}"
    if value.size > LONGEST or coded:
        return f"{head} {_base64_text(value)}"
    return f"{head}[{', '.join(map(_element_text, value.ravel()))}]"


def _base64_text(array: Any) -> str:
    return f'b64"{base64.b64encode(array.tobytes()).decode()}"'


def _element_text(element: Any) -> str:
    return str(bool(element)).lower() if element.dtype.kind == "b" else str(element)


def are_alike(raw: bytes | PerInstance, wanted: bytes) -> bool:
    """Return whether two values are the same; equal tensors may have different encodings."""
    if raw == wanted:
        return True
    if isinstance(raw, PerInstance) or wanted[:1] != b"B" or raw[:1] != b"B":
        return False
    one, other = (proto("AttrValue").FromString(each).tensor for each in (raw, wanted))
    if one.dtype == dtypes.STRING:
        return bool(one == other)
    left, right = decode_tensor(one), decode_tensor(other)
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if is_splat(left) and is_splat(right):
        left, right = splat_element(left), splat_element(right)
    return bool(left.tobytes() == right.tobytes())


class Literals:
    """Reads values from a text, one after another."""

    def __init__(self, text: str, at: int = 0) -> None:
        self.text = text
        self.at = at
        self.string = ""  # content of the last token, if it is a string
        self.constant: tuple[int, Shape | None] | None = None  # type and shape of a constant that does not state them

    def peek(self) -> str:
        """Return the next mark or word; empty for anything else."""
        found = _TOKEN.match(self.text, self.at)
        return (found["mark"] or found["word"] or "") if found else ""

    def next(self, wanted: str = "") -> re.Match[str]:
        """Return the next token.

        Raises:
            GraphError: there is none, or it is not the wanted one.
        """
        found = _TOKEN.match(self.text, self.at)
        if found is None or (wanted and found.group().strip() != wanted):
            here = self.text[self.at :].strip()[:20]
            what = f"'{wanted}'" if wanted else "a value"
            raise GraphError(f"{what} is wanted where '{here}' stands")
        self.at = found.end()
        if found["string"]:  # a regular expression needs memory for each character of a long string
            self.string, self.at = self._string(found.end() - 1)
        return found

    def _string(self, at: int) -> tuple[str, int]:
        """Return the string whose opening quotation mark is at a position, and the position of its end."""
        try:
            text, end = _JSON.raw_decode(self.text, at)
        except ValueError:
            raise GraphError(f"a string is wanted where '{self.text[at:][:20]}' stands") from None
        return text, end

    def attrs(self, kinds: Mapping[str, str]) -> dict[str, bytes | PerInstance]:
        """Read attributes between braces, by name; `kinds` are those that the op declares."""
        self.next("{")
        found: dict[str, bytes | PerInstance] = {}
        for _ in self._until("}"):
            key = self.next()["word"]
            if not key:
                raise GraphError(f"an attribute is wanted at '{self.text[self.at :][:20]}'")
            self.next("=")
            found[key] = self.value(kinds.get(key))
        return found

    def _until(self, end: str) -> Iterator[None]:
        """Yield before each item of a list, which the caller reads; read the commas between items, and the end."""
        while self.peek() != end:
            yield
            if self.peek() != end:
                self.next(",")
        self.next(end)

    def value(self, kind: str | None) -> bytes | PerInstance:
        """Return one encoded value.

        Args:
            kind: as the op declares it; None to infer it from the text.
        """
        if self.peek() == "each":
            return self._each(kind)
        begin, token = self.at, self.next()
        is_element = not token["word"] or token["word"] in _TRUTHS
        if kind == "tensor" and self.constant is not None and not token["coded"] and is_element:
            self.at = begin
            return encode("tensor", self._contents(*self.constant))
        if token["coded"] == "raw":
            return base64.b64decode(self.string)
        if token["string"]:
            return encode("string", self.string)
        if token["function"]:
            raws = self.attrs({}) if self.peek() == "{" else {}
            pairs = tuple(sorted((key, raw) for key, raw in raws.items() if isinstance(raw, bytes)))
            return encode("func", FunctionName(token["function"], pairs))
        if token["number"]:
            return self._number(token["number"], kind)
        if token["mark"] == "[":
            return self._list(kind)
        return self._word(token.group().strip(), kind)

    def _each(self, kind: str | None) -> PerInstance:
        self.next("each")
        self.next("(")
        raws: list[bytes] = []
        while not raws or self.peek() == "|":
            if raws:
                self.next("|")
            one = self.value(kind)
            if isinstance(one, PerInstance):
                raise GraphError("a value for each replica cannot itself be one for each")
            raws.append(one)
        self.next(")")
        return PerInstance(tuple(raws))

    def _number(self, text: str, kind: str | None) -> bytes:
        is_int = re.fullmatch(r"[+-]?\d+", text) is not None
        kind = kind or ("int" if is_int else "float")
        if kind == "tensor":
            raise GraphError(f"the constant {text} does not say its type: write float32[][{text}]")
        return encode(kind, int(text) if is_int and kind != "float" else float(text))

    def _word(self, word: str, kind: str | None) -> bytes:
        if word in _TRUTHS:
            return encode("bool", word == "true")
        if word in dtypes.NUMBERS and self.peek() == "[" and kind in (None, "tensor"):
            self.next("[")
            return encode("tensor", self._contents(dtypes.NUMBERS[word], self.shape() or ()))
        if word == "shape" and self.peek() == "[":
            self.next("[")
            return encode("shape", self.shape())
        number = dtype_number(word)
        if number is None:
            raise GraphError(f"'{word}' is no value", hint=SHORTENED)
        return encode("type", number)

    def _contents(self, dtype: int, shape: Shape | None) -> Any:
        """Return a constant; without a shape, the text decides whether it is a scalar or a vector."""
        token = self.next()
        if token["word"] == "splat":
            return self._splat(dtype, shape)
        if token["coded"] == "b64":
            return self._coded(dtype).reshape([dim or 0 for dim in shape or ()])
        is_list = token["mark"] == "["
        items = self._elements(dtype) if is_list else [self._element(token, dtype)]
        if shape is None:
            shape = (len(items),) if is_list else ()
        count = int(np.prod([dim or 0 for dim in shape], dtype=np.int64))
        if len(items) != count:
            problem = f"a constant of shape {shape_text(shape)} has {count} elements, not {len(items)}"
            raise GraphError(problem, hint=SHORTENED)
        array = np.array(items, object if dtype == dtypes.STRING else dtypes.numpy_dtype(dtype))
        return array.reshape([dim or 0 for dim in shape])

    def _coded(self, dtype: int) -> Any:
        """Return the elements that the last token holds in base 64."""
        return np.frombuffer(base64.b64decode(self.string), dtypes.numpy_dtype(dtype))

    def _splat(self, dtype: int, shape: Shape | None) -> Any:
        """Return a constant whose elements all equal the next token, without memory for each."""
        token = self.next()
        if token["coded"] == "b64":
            (element,) = self._coded(dtype)
        else:
            element = np.array(self._element(token, dtype), dtypes.numpy_dtype(dtype))
        return np.broadcast_to(element, [dim or 0 for dim in shape or ()])

    def _elements(self, dtype: int) -> list[Any]:
        return [self._element(self.next(), dtype) for _ in self._until("]")]

    def _element(self, token: re.Match[str], dtype: int) -> Any:
        if token["string"] and dtype == dtypes.STRING:
            return self.string
        if token["word"] in _TRUTHS:
            return token["word"] == "true"
        if token["number"] is None:
            raise GraphError(f"'{token.group().strip()}' is no element of a constant", hint=SHORTENED)
        is_float = dtype in dtypes.INEXACT
        return float(token["number"]) if is_float else int(token["number"])

    def shape(self) -> Shape | None:
        """Return the shape after an opening bracket."""
        if self.peek() == "...":
            self.next()
            self.next("]")
            return None
        dims: list[int | None] = []
        for _ in self._until("]"):
            token = self.next()
            if token["mark"] != "?" and not re.fullmatch(r"\d+", token["number"] or ""):
                raise GraphError(f"'{token.group().strip()}' is no dimension")
            dims.append(None if token["mark"] == "?" else int(token["number"]))
        return tuple(dims)

    def _list(self, kind: str | None) -> bytes:
        """Return a list, or a shape where the op declares one, after its opening bracket."""
        if kind == "shape":
            return encode("shape", self.shape())
        if kind is not None and not kind.startswith("list("):
            raise GraphError(f"a list stands where a {kind} is wanted")
        inner = kind[5:-1] if kind is not None else None
        items: list[bytes] = []
        for _ in self._until("]"):
            one = self.value(inner)
            if isinstance(one, PerInstance):
                raise GraphError("a list cannot hold a value for each replica")
            items.append(one)
        inner = inner or (_KINDS.get(items[0][:1], "int") if items else "int")
        return encode(f"list({inner})", [decode(one) for one in items])


def dtype_number(word: str) -> int | None:
    """Return the element type that a word names, None where it names none."""
    reference = word.endswith("_ref")
    number = dtypes.NUMBERS.get(word.removesuffix("_ref"))
    if number is None:
        return int(word[4:]) if re.fullmatch(r"type\d+", word) else None
    return number + dtypes.REF_OFFSET if reference else number
