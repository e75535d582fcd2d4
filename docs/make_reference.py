"""Makes settings.md, metrics.md and commands.md from the code: `python docs/make_reference.py`.

Owns how settings, metrics and options become rows; knows none by name. `--check` writes nothing and fails if
a page is stale.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from cluster.cli import _parser
from replicas.config import ReplicaConfig
from replicas.process.settings import old_settings_of, settings_of
from router.config import RouterConfig
from tests.metric_catalog import described

FOLDER = Path(__file__).resolve().parent
NOTE = "<!-- Made by docs/make_reference.py. -->"

SETTINGS = """\
Every setting is a flag (`--block-size 32`), an environment variable (`KVASIR_REPLICA_BLOCK_SIZE=32`,
`KVASIR_ROUTER_PORT=8001`) or a key of the YAML file that `--config` names (`block_size: 32`). Flags win over
the environment, and the environment wins over the file. Unknown settings are errors.

`./kvasir up --set NAME=VALUE` sets any setting of its replicas, except those that it chooses itself.
[Commands](commands.md#kvasir-up) has its own options, and those of the other commands. `deploy/fleet.yaml`
explains the fields of a fleet file, and `helm/README.md` the values of the chart.
"""

OLD_NAMES = """\
These settings still count, over those that replace them, and the router warns of each in its log. The next
version does not know them.
"""

METRICS = """\
[Monitor](monitoring.md) says where they are served. Labels have few values: served models, replicas and pools
that exist, and closed sets of words.
"""

COMMANDS_TEXT = """\
`./kvasir` in a checkout makes its environment first; an installed Kvasir has the same commands as `kvasir`.
`./kvasir test` and `./kvasir docs` need a checkout.
"""


def settings_page() -> str:
    router, replica = _settings_table(RouterConfig), _settings_table(ReplicaConfig)
    parts = (
        *(NOTE, "# Settings\n", SETTINGS),
        *("## A replica\n", "`python -m replicas`\n", replica),
        *("## A router\n", "`python -m router`\n", router),
        *("### Old names\n", OLD_NAMES, _old_names_table(RouterConfig)),
    )
    return "\n".join(parts)


def _settings_table(config_class: type) -> str:
    rows = ["| setting | default | |", "|---|---|---|"]
    rows += [
        f"| `{field.name}` | `{field.default}` | {_cell(field.metadata['help'])} |"
        for field in settings_of(config_class).values()
    ]
    return "\n".join(rows) + "\n"


def _old_names_table(config_class: type) -> str:
    rows = ["| old name | instead |", "|---|---|"]
    rows += [f"| `{name}` | {_cell(instead)} |" for name, instead in old_settings_of(config_class).items()]
    return "\n".join(rows) + "\n"


def metrics_page() -> str:
    tables = {"router": "A router", "replica": "A replica", "fleet": "The fleet controller"}
    parts = [NOTE, "# Metrics\n", METRICS]
    for process, title in tables.items():
        rows = ["| metric | type | |", "|---|---|---|"]
        for metric in sorted(described(), key=lambda metric: metric.name):
            if metric.process == process:
                labels = f"{{{','.join(sorted(metric.labels))}}}" if metric.labels else ""
                rows.append(f"| `{metric.name}{labels}` | {metric.kind} | {_cell(metric.help_text)} |")
        parts.append(f"## {title}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def commands_page() -> str:
    parts = [NOTE, "# Commands\n", COMMANDS_TEXT]
    for command, parser, summary in _commands():
        rows = ["| | |", "|---|---|"]
        rows += [f"| `{_cell(names)}` | {_cell(text)} |" for names, text in _options(parser)]
        parts.append(
            f"## kvasir {command}\n\n{summary[:1].upper()}{summary[1:]}.\n\n" + "\n".join(rows) + "\n"
        )
    return "\n".join(parts)


Described = tuple[str, argparse.ArgumentParser, str]
"""A command's words, its parser, and what it does."""


def _commands() -> Iterator[Described]:
    """Yield all commands of `kvasir`; groups come last."""
    alone: list[Described] = []
    grouped: list[Described] = []
    for name, _, _ in _within(_parser({}, "")):
        _, parser, summary = next(found for found in _within(_parser({}, name)) if found[0] == name)
        group = [(f"{name} {word}", inner, text) for word, inner, text in _within(parser)]
        grouped += group
        alone += [] if group else [(name, parser, summary)]
    yield from (*alone, *grouped)


def _within(parser: argparse.ArgumentParser) -> Iterator[Described]:
    """Yield the subcommands of a parser."""
    for group in parser._actions:
        if isinstance(group, argparse._SubParsersAction):
            summaries = {action.dest: action.help or "" for action in group._choices_actions}
            for name, inner in group.choices.items():
                yield name, inner, summaries[name]


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    formatter = argparse.HelpFormatter(parser.prog)
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        value = "" if action.nargs == 0 else formatter._format_args(action, (action.dest).upper())
        names = f"{', '.join(action.option_strings)} {value}".strip()
        text = formatter._expand_help(action) if action.help else ""
        yield names, text.replace(str(FOLDER.parent) + os.sep, "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


PAGES = {"settings.md": settings_page, "metrics.md": metrics_page, "commands.md": commands_page}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the pages are current")
    is_check = parser.parse_args().check
    os.chdir(FOLDER.parent)
    stale = []
    for name, make in PAGES.items():
        page, text = FOLDER / name, make()
        if not is_check:
            page.write_text(text, encoding="utf-8")
        elif not page.exists() or page.read_text(encoding="utf-8") != text:
            stale.append(name)
    if stale:
        sys.stderr.write(f"not what the code says: {', '.join(stale)}; run python docs/make_reference.py\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
