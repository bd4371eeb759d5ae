"""Run the command line: find the verb's module, and turn errors into messages and exit codes.

A verb is a module `tools/verbs/<name>.py` with two functions:

    add_arguments(parser)    declare its options on an argparse parser, which already has `--json`
    run(args) -> int         run it; return 0 (good) or 1 (the check failed)

Only the requested verb is imported, so `--help` and verbs that merely read protobufs never start TensorFlow. Errors of
verbs are handled here: a `RewriteError` or an unreadable file becomes exit code 2 and a message.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NoReturn

import autograph_rewrite
from autograph_rewrite.errors import GraphError, RewriteError
from autograph_rewrite.requires import missing_tensorflow
from autograph_rewrite.runtime.job.join_on_import import stay_out
from autograph_rewrite.tools.output_pipes import drop_the_rest, escaped, patient_output, quiet_tensorflow

GOOD, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

VERBS = {
    "inspect": "show inputs, outputs, variables, op counts and warnings of a graph",
    "plan": "run the strategy builder and print or write its plan",
    "rewrite": "write the distributed graph",
    "dump": "print a graph as text, table, JSON or dot",
    "diff": "show what changed between two graphs",
    "explain": "say in sentences what a rewrite does, what is divided and what runs whole",
    "why": "say why a value is placed as it is, and which pass and plan line made it",
    "why-not": "say where a strategy puts a variable, and why it does not shard it further",
    "comm": "list the collectives: members, order, bytes per step",
    "opt": "run chosen passes on a graph and print the result, with placements",
    "verify": "check a rewrite numerically against the single-device graph",
    "bisect": "find the first pass, value and edge after which verify fails",
    "reduce": "shrink a graph whose rewrite fails to a small one that still fails",
    "report": "write one offline HTML file: the graph after every pass, tables, the predicted step",
    "profile": "run a script, and show where the time of its steps went on all ranks",
    "simulate": "predict step time, memory and communication",
    "run": "run a script under a configuration",
    "launch": "run a script under a configuration on several processes",
    "completion": "print the script that lets bash, zsh or fish complete command lines",
}

# Output of scripts is not intercepted: a closed pipe fails as under `python`.
SCRIPTS = ("run", "launch", "profile")
GROUPS = {
    "look at a graph": ("inspect", "dump", "diff"),
    "distribute it": ("plan", "rewrite", "run", "launch"),
    "see why": ("explain", "why", "why-not", "comm", "report"),
    "see what it costs": ("simulate", "profile"),
    "see whether it is right": ("verify", "bisect", "reduce"),
    "tools": ("opt", "completion"),
}
EXAMPLES = {
    "inspect": "inspect model.ar",
    "dump": "dump new.ar --around loss --depth 3",
    "diff": "diff model.ar new.ar",
    "plan": "plan model.ar --config fsdp -o plan.yaml",
    "rewrite": "rewrite model.ar --config all_reduce_mirrored -o new.ar",
    "run": "run --config all_reduce_mirrored train.py",
    "launch": "launch -n 2 --config all_reduce train.py",
    "explain": "explain model.ar --config fsdp",
    "why": "why new.ar loss",
    "why-not": "why-not model.ar dense/kernel FSDP",
    "comm": "comm new.ar",
    "report": "report model.ar --config all_reduce_mirrored --verify",
    "simulate": "simulate model.ar --config fsdp --calibrate",
    "profile": "profile --config all_reduce_mirrored train.py",
    "verify": "verify model.ar --config fsdp --steps 5",
    "bisect": "bisect model.ar --config fsdp",
    "reduce": "reduce model.ar --config fsdp -o small.txt",
    "opt": "opt model.ar --passes normalise,propagate --config fsdp",
    "completion": "completion bash",
}

EPILOG = "exit codes: 0 good, 1 the check failed, 2 bad usage or input; VERB --help says more"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    stay_out()
    try:
        return _run(parse(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:  # it may come while a verb is imported
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(args: argparse.Namespace) -> int:
    if args.verb in SCRIPTS:
        return _outcome(args)
    from autograph_rewrite.diagnostics.progress_line import progress_on

    with quiet_tensorflow() as show, progress_on(sys.stderr) as line:
        with patient_output(line.clear if line is not None else None):
            code = _outcome(args)
        if code != GOOD:
            show()
        return code


def _outcome(args: argparse.Namespace) -> int:
    try:
        code: int = load_verb(args.verb).run(args)
        sys.stdout.flush()  # a full disk must fail here, not at interpreter exit
        return code
    except BrokenPipeError:  # Python would write to the pipe again at exit, so drop the buffered rest
        drop_the_rest(sys.stdout)
        return FAILED
    except Exception as error:
        return report(of_the_graph(error, args), as_json=args.json)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; only its verb is loaded."""
    verbs = available_verbs()
    parser = Parser(
        prog="autograph-rewrite",
        description=f"{autograph_rewrite.__doc__.partition(chr(10))[0]}\n\n{_listed(verbs)}",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {autograph_rewrite.__version__}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True, help=argparse.SUPPRESS)
    require_known_verb(parser, argv, verbs)
    for verb in verbs:
        subparser = subparsers.add_parser(verb)
        if argv and argv[0] == verb:
            _declare(verb, subparser)
            require_known_options(subparser, argv[1:])
    return parser.parse_args(argv)


def parser_of(verb: str) -> argparse.ArgumentParser:
    """Return the parser of one verb, with all its arguments."""
    parser = argparse.ArgumentParser(prog=f"autograph-rewrite {verb}")
    _declare(verb, parser)
    return parser


def _declare(verb: str, parser: argparse.ArgumentParser) -> None:
    module = load_verb(verb)
    parser.description = f"{(module.__doc__ or '').partition('`: ')[2]}\n\nexample: autograph-rewrite {EXAMPLES[verb]}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    module.add_arguments(parser)


def _listed(verbs: Sequence[str]) -> str:
    """Return the verbs by group, with an example each, in lines of at most 80 letters."""
    lines = []
    for title, group in GROUPS.items():
        lines.append(f"{title}:")
        for verb in (one for one in group if one in verbs):
            lines += [*textwrap.wrap(f"{verb:<11}{VERBS[verb]}", 77, initial_indent="  ", subsequent_indent=" " * 13)]
            lines.append(f"{'':13}$ autograph-rewrite {EXAMPLES[verb]}")
    return "\n".join(lines)


def available_verbs() -> list[str]:
    """Return the verbs whose module exists, in the order of `VERBS`."""
    return [verb for verb in VERBS if importlib.util.find_spec(module_of(verb)) is not None]


def load_verb(verb: str) -> ModuleType:
    """Import the module of a verb."""
    return importlib.import_module(module_of(verb))


def module_of(verb: str) -> str:
    """Return the module that implements a verb."""
    return f"{__package__}.verbs.{verb.replace('-', '_')}"


def report(error: Exception, *, as_json: bool) -> int:
    """Print an error on standard error (and, for `--json`, as an object on standard output)."""
    if isinstance(error, ModuleNotFoundError) and error.name == "tensorflow":
        error = missing_tensorflow()
    if not isinstance(error, (RewriteError, OSError)):
        traceback.print_exception(error)
        print("this is a bug in autograph-rewrite: please report it with the lines above", file=sys.stderr)
        return BAD_INPUT
    print(escaped(f"{type(error).__name__}: {error}"), file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        print(escaped(note), file=sys.stderr)
    if as_json:
        print(json.dumps({"error": describe(error)}))
    return BAD_INPUT


def describe(error: RewriteError | OSError) -> dict[str, str | None]:
    """Return an error as plain data."""
    kind = type(error).__name__
    if isinstance(error, OSError):
        return {"type": kind, "problem": str(error)}
    where = {"where": error.where, "node": error.node_name}
    return {"type": kind, "problem": error.problem, **where, "hint": error.hint}


# Unexpected errors: if TensorFlow cannot import the graph either, the graph is the cause.
#
# KeyError in a pass ──► tf.import_graph_def(graph) fails ──► GraphError: TensorFlow cannot load this graph


def of_the_graph(error: Exception, args: argparse.Namespace) -> Exception:
    """Return an error; replace an unexpected one by TensorFlow's error, if TensorFlow cannot import the graph."""
    if (
        isinstance(error, (RewriteError, OSError, ModuleNotFoundError))
        or not {"graph", "train_op"} <= vars(args).keys()
    ):
        return error
    from autograph_rewrite.requires import tensorflow
    from autograph_rewrite.tools.common_arguments import load_graph

    try:
        graph_def = load_graph(args).graph_def
    except RewriteError:
        return error
    tf = tensorflow()
    try:
        with tf.Graph().as_default():
            tf.graph_util.import_graph_def(graph_def, name="")
    except Exception as refusal:  # TensorFlow raises several types, all for malformed graphs
        said = next(iter(str(refusal).splitlines()), "")
        refused = GraphError(f"TensorFlow cannot load this graph: {said}", where=str(args.graph))
        refused.__cause__ = error
        return refused
    return error


# Mistyped words of a command line: the message for an unknown verb or option suggests the closest known one.
#
# autograph-rewrite verfy g.pb            there is no verb 'verfy': did you mean 'verify'?
# autograph-rewrite plan g.pb --confg C   there is no option '--confg': did you mean '--config'?


class Parser(argparse.ArgumentParser):
    """A parser that escapes control characters in its error messages, which repeat words of the command line."""

    def error(self, message: str) -> NoReturn:
        """Print an error, and end the program."""
        super().error(escaped(message))


def options_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options and positional arguments of a parser."""
    return parser._actions  # argparse has no public access to them


def require_known_verb(parser: argparse.ArgumentParser, argv: Sequence[str], verbs: Sequence[str]) -> None:
    """End the program if the first word is neither a verb nor an option."""
    if argv and not argv[0].startswith("-") and argv[0] not in verbs:
        parser.error(f"there is no verb '{argv[0]}': {_closest(argv[0], verbs, 'verbs')}")


def require_known_options(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """End the program if a word looks like a long option and is no prefix of one.

    Args:
        words: those after the verb; the arguments of a script are not checked.
    """
    by_name = {name: action for action in options_of(parser) for name in action.option_strings}
    takes_rest = any(action.nargs == argparse.REMAINDER for action in options_of(parser))
    for name in _long_options(by_name, words, takes_rest=takes_rest):
        if not any(known.startswith(name) for known in by_name):
            known = [one for one in by_name if one.startswith("--")]
            parser.error(f"there is no option '{name}': {_closest(name, known, 'options')}")


def _closest(word: str, known: Sequence[str], noun: str) -> str:
    from autograph_rewrite.diagnostics.faults import did_you_mean  # importing it takes as long as all of --help

    return did_you_mean(word, known, noun=noun)


def _long_options(by_name: dict[str, argparse.Action], words: Sequence[str], *, takes_rest: bool) -> Iterator[str]:
    """Yield the long options among words, without their values."""
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        action = by_name.get(name)
        if word == "--" or (takes_rest and not word.startswith("-")):
            return
        if word.startswith("--"):
            yield name
        if action is not None and action.nargs != 0 and not equals:
            next(rest, None)


if __name__ == "__main__":
    sys.exit(main())
