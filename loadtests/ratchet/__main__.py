"""`python -m loadtests.ratchet`: what every row comes to now, next to the file, and the file written anew.

python -m loadtests.ratchet                        all rows but those of instructions, in a minute
python -m loadtests.ratchet --only "coding agents" some of them
python -m loadtests.ratchet --write                the file anew; rows that were not measured stay
python -m loadtests.ratchet --instructions         these as well; takes valgrind and some minutes
"""

import argparse
from collections.abc import Iterator, Mapping

from loadtests.ratchet import index_memory, instructions
from loadtests.ratchet.figures_file import FILE, read_figures, write_figures
from loadtests.ratchet.rows import CARRIED, ROWS
from loadtests.ratchet.verdict import Change, Figures, much_better, text, worse, worse_on_average


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name has it")
    parser.add_argument("--instructions", action="store_true", help="count instructions, too")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name} anew")
    arguments = parser.parse_args()
    old, new, without_queue = read_figures(), {}, {}
    for name, figures in _measured(arguments.only, with_instructions=arguments.instructions):
        new[name] = figures
        print(f"{name}: {_words(figures)}", flush=True)
        if name in CARRIED:
            without_queue[name] = CARRIED[name].without_queue.figures
            print(f"    without the queue: {_words(without_queue[name])}", flush=True)
    lost = worse(old, new)
    _print("Worse than the file says", lost)
    _print("Much better than the file says", much_better(old, new))
    _print("Worse than without the queue", worse(without_queue, new))
    _print("Worse than without the queue, on average", worse_on_average(without_queue, new))
    if arguments.write:
        write_figures(_in_order({**old, **new}))
        print(f"\n{FILE} is written anew.")
    return 1 if lost and not arguments.write else 0


def _measured(only: str, *, with_instructions: bool) -> Iterator[tuple[str, Mapping[str, float]]]:
    for name, row in ROWS.items():
        if only in name:
            yield name, row.figures
    if only in index_memory.ROW:
        yield index_memory.ROW, index_memory.index_figures()
    if with_instructions:
        yield instructions.ROW, instructions.count_instructions()


def _in_order(figures: Figures) -> Figures:
    """Rows that there are no longer are left out; instructions stay, whichever Python they are of."""
    names = [*ROWS, index_memory.ROW, *sorted(name for name in figures if name.startswith("instructions"))]
    return {name: figures[name] for name in names if name in figures}


def _words(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())


def _print(heading: str, changes: list[Change]) -> None:
    if changes:
        print(f"\n{heading}:\n{text(changes)}")


if __name__ == "__main__":
    raise SystemExit(main())
