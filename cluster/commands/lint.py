"""kvasir lint: where prompts in a log of request bodies break their prefixes, and the cost.

Owns the file, the table and the exit status. Needs no cluster: tokenizer and chat template come from a model
directory.
"""

import argparse
import contextlib
import gzip
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

from cluster.commands.tables import align
from cluster.errors import ClusterError
from replicas.checkpoints.image_rules import read_image_rule
from replicas.checkpoints.model_config import CheckpointError
from replicas.checkpoints.weights import tokenizer_bundle
from replicas.protocol.image_rules import written_rule
from replicas.toy_model import checkpoint_directory
from router.api.logged_prompts import LoggedModel, NoPrompt, logged_prompts
from router.explain.linting.habits import ADVICE, WHAT, Habit
from router.explain.linting.linter import Linter
from router.explain.linting.log_lines import BadLine, read_line
from router.explain.linting.tally import Finding, Tally, as_plain
from router.prompt.tokenizer import TokenizerError

FOUND, BAD_INPUT = 1, 2
MAX_LINE_BYTES = 64 * 2**20
MOST_COMPLAINTS = 10
MOST_ROWS = 40

_GZIP = b"\x1f\x8b"


def lint(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Run the command and return its exit status. Raises ClusterError."""
    try:
        directory = checkpoint_directory(arguments.model)
        rule, _ = read_image_rule(directory)
        model = LoggedModel.of(tokenizer_bundle(directory), written_rule(rule))
    except (CheckpointError, TokenizerError, OSError) as error:
        raise ClusterError(f"cannot read the tokenizer: {error}") from error
    run = _LintRun(model, arguments.block_size)
    try:
        with _opened(arguments.file) as file:
            for number, line in _lines(file):
                run.take(number, line)
    except (OSError, EOFError) as error:
        raise ClusterError(f"cannot read {arguments.file}: {error}") from error
    if arguments.json:
        plain = as_plain(run.tally, arguments.prefill_rate)
        say(json.dumps({**plain, **run.left_out()}, indent=2, ensure_ascii=False))
    else:
        say(render(run.tally, run.linter.num_forgotten, arguments.prefill_rate))
    for complaint in run.complaints:
        sys.stderr.write(complaint + "\n")
    if run.num_bad_lines or not run.tally.num_prompts:
        return BAD_INPUT
    return FOUND if run.tally.lost_percent > arguments.tolerate else 0


class _LintRun:
    """One pass over a log."""

    def __init__(self, model: LoggedModel, block_size: int) -> None:
        self._model = model
        self._block_size = block_size
        self.linter = Linter()
        self.tally = Tally()
        self.complaints: list[str] = []
        self.num_bad_lines = 0
        self.num_refused = 0

    def take(self, number: int, line: bytes | None) -> None:
        """Process a line; None stands for one that was too long."""
        if line is None:
            self._complain(number, f"it is longer than {MAX_LINE_BYTES >> 20} MiB")
            self.num_bad_lines += 1
            return
        try:
            request = read_line(line)
            for prompt in logged_prompts(self._model, request, number, self._block_size):
                num_cached, found = self.linter.take(prompt)
                self.tally.add(len(prompt.token_ids), num_cached, found)
            self.tally.num_requests += 1
        except BadLine as error:
            self._complain(number, str(error))
            self.num_bad_lines += 1
        except NoPrompt as error:
            self._complain(number, str(error))
            self.num_refused += 1

    def _complain(self, number: int, sentence: str) -> None:
        if len(self.complaints) < MOST_COMPLAINTS:
            self.complaints.append(f"line {number}: {sentence}")
        elif len(self.complaints) == MOST_COMPLAINTS:
            self.complaints.append("and more such lines")

    def left_out(self) -> dict[str, int]:
        return {
            "num_bad_lines": self.num_bad_lines,
            "num_refused": self.num_refused,
            "num_forgotten": self.linter.num_forgotten,
        }


@contextlib.contextmanager
def _opened(name: str) -> Iterator[IO[bytes]]:
    """Open a file, gzipped or not; stdin for `-`."""
    with contextlib.ExitStack() as stack:
        file = cast(io.BufferedReader, sys.stdin.buffer)
        if name != "-":
            file = stack.enter_context(Path(name).open("rb"))
        is_packed = file.peek(len(_GZIP)).startswith(_GZIP)
        yield cast("IO[bytes]", stack.enter_context(gzip.GzipFile(fileobj=file)) if is_packed else file)


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Yield the non-empty lines with their numbers. A line that is too long is read in pieces and yielded as
    None."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            while rest := file.readline(MAX_LINE_BYTES):
                if rest.endswith(b"\n"):
                    break
            yield number, None
        elif line.strip():
            yield number, line


def render(tally: Tally, num_forgotten: int, prefill_rate: float | None) -> str:
    if not tally.num_prompts:
        return "The log has no prompt, so nothing was checked."
    lost, total = tally.num_lost_tokens, max(1, tally.num_tokens)
    cached, lost_words = 100 * tally.num_cached_tokens / total, _count(lost, "token")
    lines = [
        f"{_count(tally.num_requests, 'request')} with {tally.num_tokens:,} prompt tokens.",
        f"A cache that forgets nothing would hold {cached:.1f} % of them, and if no prefix were broken",
        f"{tally.lost_percent:.1f} % more: {lost_words}{_seconds(lost, prefill_rate)}.",
        "Real caches forget, so both are upper bounds.",
    ]
    if num_forgotten:
        lines.append(
            f"The log is too large to be remembered whole: {num_forgotten:,} entries were forgotten."
        )
    found = tally.ordered()
    if not found:
        return "\n".join([*lines, "", "Nothing breaks a prefix."])
    rows: list[tuple[str, ...]] = [("LOST", "SHARE", "TIMES", "WHERE", "WHAT", "LINES")]
    rows += [_row(finding, total) for finding in found[:MOST_ROWS]]
    lines += ["", *align(rows)]
    if len(found) > MOST_ROWS:
        lines.append(f"and {len(found) - MOST_ROWS} more; --json has all of them")
    habits = dict.fromkeys(finding.habit for finding in found[:MOST_ROWS])
    return "\n".join([*lines, "", *(_advice(habit) for habit in habits)])


def _row(finding: Finding, total: int) -> tuple[str, ...]:
    pairs = [f"{found.earlier_line}→{found.line}" for found in finding.examples[:3]]
    more = " …" if finding.num_breaks > len(pairs) else ""
    return (
        f"{finding.num_lost_tokens:,}",
        f"{100 * finding.num_lost_tokens / total:.1f} %",
        f"{finding.num_breaks:,}",
        finding.shown_path,
        WHAT[finding.habit],
        ", ".join(pairs) + more,
    )


def _advice(habit: Habit) -> str:
    what = WHAT[habit]
    return f"- {what[0].upper()}{what[1:]}: {ADVICE[habit]}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _seconds(num_tokens: int, prefill_rate: float | None) -> str:
    return f", {num_tokens / prefill_rate:,.1f} s of computation" if prefill_rate else ""
