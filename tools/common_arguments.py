"""Declare and read the arguments that verbs share, and print and write their results.

Modules that read graphs are imported where they are called, so that `--help` stays fast.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import autograph_rewrite as ar
from autograph_rewrite.diagnostics import files
from autograph_rewrite.diagnostics.progress_line import stage
from autograph_rewrite.errors import GraphError
from autograph_rewrite.tools.standard_streams import STANDARD, readable, to_standard_output

if TYPE_CHECKING:
    from autograph_rewrite.inspect.report_view import Account

_SCRIPT = re.compile(r".+\.py(:\w+)?")
GRAPH_FORMS = (".ar", ".pb", ".pbtxt")
_DIGITS = 15
"""The most digits of a number on the command line."""
PLAN_FORMS = (".yaml", ".yml", ".json", ".pb", ".binpb")
CONFIG_HELP = "a YAML configuration, or the name of a shipped one (all_reduce, fsdp, ...)"
GRAPH_HELP = (
    "a script that trains (train.py, train.py:model; it runs up to its first step), a .keras, .pb, .pbtxt, .meta, .ar "
    "or .txt (`dump --full`) file, a SavedModel directory, or - for standard input"
)


def add_graph(parser: argparse.ArgumentParser) -> None:
    """Declare the graph, and the names that a raw GraphDef lacks."""
    parser.add_argument("graph", metavar="GRAPH", help=GRAPH_HELP)
    add_names(parser)


def add_names(parser: argparse.ArgumentParser) -> None:
    """Declare the names that a raw GraphDef lacks."""
    group = parser.add_argument_group("names, where the file does not tell them")
    group.add_argument(
        "--train-op", metavar="NODE", action="append", help="a node that one training step runs; may be repeated"
    )
    group.add_argument("--output", metavar="TENSOR", action="append", help="a declared output; may be repeated")
    group.add_argument("--init-op", metavar="NODE", help="the node that initialises all variables")
    group.add_argument(
        "--batch-input",
        metavar="NAME=AXIS",
        action="append",
        type=batch_input,
        help="an input and the axis of it that counts examples, or NAME=none; may be repeated",
    )
    group.add_argument("--signature", metavar="NAME", help="the signature of a SavedModel")


def batch_input(text: str) -> tuple[str, int | None]:
    """Read `NAME=AXIS`."""
    name, equals, axis = text.rpartition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=AXIS")
    if axis.lower() == "none":
        return name, None
    try:
        return name, int(axis)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{axis}' is no axis: write a number, or none") from None


def load_graph(args: argparse.Namespace, path: str | None = None) -> ar.GraphItem:
    """Read the graph that the arguments name.

    Raises:
        GraphError: the graph does not exist, is corrupt, or lacks a given name.
    """
    return _load(args, path)[0]


def load_step(args: argparse.Namespace) -> tuple[ar.GraphItem, int | None]:
    """Read the graph, and return it with the examples of a step: `--batch`, else those of the `fit` of a script.

    Raises:
        GraphError: as `load_graph`.
    """
    item, examples = _load(args, None)
    return item, args.batch or examples


def _load(args: argparse.Namespace, path: str | None) -> tuple[ar.GraphItem, int | None]:
    given = args.graph if path is None else path
    stage("reading %s", given)
    inputs = dict(args.batch_input) if args.batch_input else None
    if _SCRIPT.fullmatch(given):
        from autograph_rewrite.tools.script_graph import load_script

        return load_script(given, inputs)
    with readable(given) as file:
        names = {"train_op": args.train_op, "outputs": args.output, "init_op": args.init_op}
        return ar.GraphItem.load(file, **names, batch_inputs=inputs, signature=args.signature), None


def add_config(parser: argparse.ArgumentParser, *, plan: bool = False, required: bool = True) -> None:
    """Declare `--config`, or the choice of `--config` and `--plan`.

    Args:
        plan: a plan may be given instead.
        required: one of them must be given.
    """
    if not plan:
        parser.add_argument("--config", metavar="CONFIG", required=required, help=CONFIG_HELP)
        add_allow_code(parser)
        return
    group = parser.add_mutually_exclusive_group(required=required)
    group.add_argument("--config", metavar="CONFIG", help=CONFIG_HELP)
    group.add_argument("--plan", metavar="PLAN", help="a plan that `plan -o` wrote")
    add_allow_code(parser)


def add_allow_code(parser: argparse.ArgumentParser) -> None:
    """Declare `--allow-code`."""
    parser.add_argument("--allow-code", action="store_true", help="run the Python files that the configuration names")


def add_batch(parser: argparse.ArgumentParser) -> None:
    """Declare `--batch`."""
    text = "examples of one step on all devices together (default: as graph or script say, else 32 for each)"
    parser.add_argument("--batch", metavar="N", type=number_of("examples"), help=text)


def add_comparison(parser: argparse.ArgumentParser, *, steps: int = 3) -> None:
    """Declare the options of verbs that compare a rewrite with its original.

    Args:
        steps: the default number of training steps.
    """
    text = f"training steps (default {steps})"
    parser.add_argument("--steps", metavar="K", type=number_of("steps"), default=steps, help=text)
    add_batch(parser)
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="seed of the random feeds (default 0)")
    parser.add_argument("--rtol", metavar="R", type=float, default=1e-5, help="relative tolerance (default 1e-5)")


def comparison(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `add_comparison` as keywords of `verify`, `bisect` and `reduce`."""
    return {name: getattr(args, name) for name in ("steps", "seed", "rtol", "batch")}


def command_line(verb: str, graph: str, args: argparse.Namespace) -> str:
    """Return the command of another comparing verb with the same options."""
    given = {name: getattr(args, name, None) for name in ("config", "plan", "steps", "seed", "rtol", "batch")}
    line = ["autograph-rewrite", verb, graph]
    line += [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    if graph == args.graph:  # the file may lack the names that were given; a reduced graph has them
        names = {"--init-op": [args.init_op], "--train-op": args.train_op, "--output": args.output}
        names |= {"--batch-input": [f"{name}={axis}" for name, axis in args.batch_input or ()]}
        names |= {"--signature": [args.signature]}
        line += [word for name, values in names.items() for value in values or () if value for word in (name, value)]
    return shlex.join(line + (["--allow-code"] if args.allow_code else []))


def number_of(what: str) -> Callable[[str], int]:
    """Return a function that reads a positive number of `what`."""

    def read(text: str) -> int:
        if not text.isdigit() or len(text) > _DIGITS or not int(text):
            raise argparse.ArgumentTypeError(f"'{text}' is no number of {what}")
        return int(text)

    return read


def account_data(account: Account) -> dict[str, Any]:
    """Return the plain data of an account that verbs share; ops that made work whole, the most expensive first."""
    covered = account.covered
    return {
        "replicas": account.plan.replicas,
        "mode": account.plan.mode,
        "coverage": covered.share,
        "batch": covered.batch,
        "whole": [
            {"node": one.node, "op": one.op, "flops": one.amount.flops, "reason": one.reason} for one in covered.largest
        ],
        "notes": [vars(note) for note in account.report.notes],
        "plan_notes": list(account.plan_notes),
    }


def read_config(args: argparse.Namespace, *, load_custom_ops: bool = True) -> ar.Config:
    """Read the configuration that `--config` names; with `--allow-code`, allow the code that it names.

    Args:
        load_custom_ops: run the files of custom ops now, before a graph with such ops is read.

    Raises:
        ConfigError: the configuration is wrong, or a file that it names does not exist.
    """
    from autograph_rewrite.config.user_code import allow_code, named_files

    config = ar.Config.load(args.config)
    for file in named_files(config) if args.allow_code else ():
        allow_code(file)
    if config.ops and load_custom_ops:
        from autograph_rewrite.plan.user_extensions import load_ops

        load_ops(config)
    return config


def config_or_plan(args: argparse.Namespace) -> ar.Config | ar.Plan:
    """Return the configuration or plan of `--config` or `--plan`.

    Raises:
        ConfigError: the configuration is wrong.
        PlanError: the plan is wrong.
    """
    plan = optional_plan(args)
    return plan if plan is not None else read_config(args)


def optional_plan(args: argparse.Namespace) -> ar.Plan | None:
    """Return the plan that `--plan` names, if it is given.

    Raises:
        PlanError: the file is no plan.
    """
    return None if getattr(args, "plan", None) is None else ar.Plan.load(args.plan)


def print_json(data: Any) -> None:
    """Print plain data as JSON."""
    print(json.dumps(data, indent=1, ensure_ascii=False))


class Printable(Protocol):
    """A result of a verb, as text and as data."""

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""


class Verdict(Printable, Protocol):
    """The result of a comparison."""

    @property
    def ok(self) -> bool:
        """Whether both graphs agree."""


def print_found(found: Printable, args: argparse.Namespace) -> None:
    """Print a result, as text or, with `--json`, as JSON."""
    if args.json:
        print_json(found.data())
    else:
        emit(str(found), None)


def print_verdict(found: Verdict, args: argparse.Namespace) -> int:
    """Print the result of a comparison, and return the exit code."""
    print_found(found, args)
    return 0 if found.ok else 1


@contextmanager
def replacing(path: str, form: str) -> Iterator[Path]:
    """Yield a temporary path, which replaces `path` if the block ends without an error.

    Args:
        path: of the file; - for standard output.
        form: suffix of the form for standard output.

    Raises:
        GraphError: the folder does not exist or cannot be written to.
    """
    if path == STANDARD:
        with to_standard_output(form) as partial:
            yield partial
        return
    with ExitStack() as stack:
        try:
            partial = stack.enter_context(files.replacing(path))
        except OSError as error:
            raise GraphError(
                f"cannot write '{path}': {error.strerror}", hint="name a file that can be written"
            ) from None
        yield partial


@contextmanager
def plan_file(path: str | None) -> Iterator[Path | None]:
    """Yield a temporary path for a plan, which replaces `path` as in `replacing`; None without a path.

    Raises:
        GraphError: the suffix is that of no plan, or the file cannot be written.
    """
    if path is None:
        yield None
        return
    check_form(path, PLAN_FORMS, "plan")
    with replacing(path, PLAN_FORMS[0]) as partial:
        yield partial


def emit(text: str, out: str | None) -> None:
    """Print a text, or write it to a file."""
    if out is None or out == STANDARD:
        print(text, end="" if text.endswith("\n") else "\n")
        return
    with replacing(out, Path(out).suffix) as partial:
        partial.write_text(text, encoding="utf-8")


def check_form(out: str, forms: Sequence[str], what: str) -> None:
    """Refuse a file name whose suffix is not that of a known form.

    Args:
        out: path of the file; - for standard output, which has the default form.
        forms: suffixes, such as ".yaml".

    Raises:
        GraphError: the suffix is unknown.
    """
    if out != STANDARD and Path(out).suffix.lower() not in forms:
        raise GraphError(f"'{out}' does not say which form the {what} has", hint=f"name it {' or '.join(forms)}")


def write_item(item: ar.GraphItem, path: Path) -> None:
    """Write a graph in the form of its suffix: .pb, .pbtxt, or else .ar.

    Raises:
        GraphError: it cannot be written.
    """
    if path.suffix.lower() == ".pb":
        path.write_bytes(item.graph_bytes)
    elif path.suffix.lower() == ".pbtxt":
        from google.protobuf import text_format

        from autograph_rewrite.ir.types.protos import proto

        message = proto("GraphDef").FromString(item.graph_bytes)
        path.write_text(text_format.MessageToString(message), encoding="utf-8")
    else:
        item.save(path)
