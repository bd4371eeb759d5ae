"""Run the corpus, or write its table.

python -m tests.corpus                             all programs on all configurations; continued where it stopped
python -m tests.corpus --only dcgan,vit            some programs
python -m tests.corpus --configurations all_reduce_2
python -m tests.corpus --verbose --only dcgan      here, with everything that it says
python -m tests.corpus table                       docs/corpus.md, from what has been run
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.corpus.configurations import BY_NAME
from tests.corpus.words import BAD

OUT = Path("build/corpus.jsonl")
PAGE = Path("docs/corpus.md")


def main(arguments: list[str]) -> int:
    """Return the exit code: 1 where something came out wrong, foreign or hung."""
    parser = argparse.ArgumentParser(prog="python -m tests.corpus", description="Run programs of public libraries.")
    parser.add_argument("verb", nargs="?", choices=("run", "table"), default="run")
    parser.add_argument("--only", default="", help="programs or libraries, with commas; left out: all")
    parser.add_argument("--configurations", default=",".join(BY_NAME), help="with commas")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON lines, continued where the file exists")
    parser.add_argument("--again", default="", help="outcomes to run again, with commas")
    parser.add_argument("--verbose", action="store_true", help="run in this process, and print everything")
    options = parser.parse_args(arguments)
    if options.verbose:
        from tests.fuzz.worker import prepare

        prepare()
    from tests.corpus import catalogue, many, table

    if options.verb == "table":
        PAGE.write_text(table.page(many.read(options.out)), encoding="utf-8")
        return 0
    wanted = [one for one in options.only.split(",") if one]
    chosen = {
        name: library
        for name, (library, _) in catalogue.programs().items()
        if not wanted or name in wanted or library.name in wanted
    }
    if not chosen:
        parser.error(f"there is no program called {options.only}")
    names = options.configurations.split(",")
    if options.verbose:
        return verbose(list(chosen), names)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    many.forget(options.out, set(options.again.split(",")), set(chosen))
    groups = [
        (library, [(name, each) for name, owner in chosen.items() if owner is library for each in library.takes(names)])
        for library in catalogue.LIBRARIES
    ]
    lines = [line for line in many.run_many(groups, options.out, _say) if line["program"] in chosen]
    print("\n".join(table.summary(lines)))
    return int(any(line["outcome"] in BAD for line in lines))


def _say(text: str) -> None:
    print(text, flush=True)


def verbose(programs: list[str], names: list[str]) -> int:
    """Run programs in this process."""
    from tests.corpus import catalogue, many
    from tests.corpus.judge import Judge

    is_bad = False
    for program in programs:
        library, one = catalogue.programs()[program]
        judge = Judge(one)
        for name in library.takes(names):
            line = {"program": program, "configuration": name, "library": library.name, **judge.run(BY_NAME[name])}
            is_bad = is_bad or line["outcome"] in BAD
            print(many.sentence(line))
            for key in ("whole", "detail"):
                print(f"  {key}: {line.get(key, '')}")
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
