"""`python -m loadtests.reports.page`: makes an HTML page and a Markdown file from run files.

Owns the command line and the files. html_page.py and markdown.py make pages and tables.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtests.arguments import positive
from loadtests.reports.comparison import compare, verdict
from loadtests.reports.html_page import page
from loadtests.reports.markdown import markdown
from loadtests.reports.report import Slo
from loadtests.reports.run_file import Run, RunFileError, read_run


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = _parser().parse_args(words)
    slo = Slo(arguments.slo_ttft, arguments.slo_tpot, arguments.slo_e2e)
    try:
        runs = [(name, read_run(path)) for name, path in _names(arguments.runs)]
        for line in write_pages(runs, slo, html=arguments.html, markdown_file=arguments.markdown):
            print(line)
    except RunFileError as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0


def write_pages(
    runs: Sequence[tuple[str, Run]], slo: Slo, *, html: Path | None = None, markdown_file: Path | None = None
) -> list[str]:
    """Write the requested files; returns each test's sentence about the winner. Raises RunFileError."""
    sets = compare(runs, slo)
    if html is not None:
        _write(html, page(sets, slo))
    if markdown_file is not None:
        _write(markdown_file, markdown(sets))
    return [f"{each.test}: {verdict(each)}" for each in sets]


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunFileError(f"{file} cannot be written: {error.strerror}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.reports.page",
        description="Show runs of load tests side by side. The first policy is what the others are "
        "compared with; runs that differ in nothing but their seed are shown by their medians.",
    )
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN.json", help="a run file; .gz is read too")
    add("--html", type=Path, metavar="FILE", help="write the page there")
    add("--markdown", type=Path, metavar="FILE", help="write the tables there")
    add("--slo-ttft", type=positive, default=2.0, metavar="S", help="TTFT limit of the SLO (default: 2)")
    add("--slo-tpot", type=positive, metavar="S", help="TPOT limit of the SLO (default: none)")
    add("--slo-e2e", type=positive, metavar="S", help="limit of the SLO for a whole answer (default: none)")
    return parser


def _names(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    """Return file names, with enough of their folders to distinguish them."""
    is_short = len({path.name for path in paths}) == len(paths)
    return [(path.name if is_short else str(path), path) for path in paths]


if __name__ == "__main__":
    sys.exit(main())
