"""How `pytest -n` shares the tests out: a file to one worker, what takes longest first, some not at all.

Also which files have failed, so that `./kvasir test` can run them again.

The `--dist loadgroup` of xdist does not share out: it writes groups into the names of tests, which pytest 9
ignores without a word. So groups are made of the names that tests have anyway.
"""

import os
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

CLIENTS = "tests/clients/"
FILES_WITH_IMAGES = ("test_images.py", "test_compose_runs.py", "test_cuda_image.py")


class Groups(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """Tests of a file share what is built for their module, those of clients a cluster. vLLM takes memory,
    images take minutes.
    """
    file = nodeid.partition("::")[0]
    if file.startswith(CLIENTS):
        return CLIENTS
    if "vllm" in nodeid.lower():
        return "vllm"
    return "images" if file.endswith(FILES_WITH_IMAGES) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Groups:
    config.option.loadscopereorder = False  # in the order below, not by the number of tests
    return Groups(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--alone", action="store_true", help="only what needs the machine to itself")
    parser.addoption("--failed-to", metavar="FILE", help="where to list the files of tests that have failed")
    parser.addoption("--counts-to", metavar="FILE", help="where to write how many tests passed, failed, …")
    parser.addoption("--only-files", metavar="FILE", help="only tests of the files that this one lists")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What is left out below need not be loaded, where a whole file is."""
    if collection_path.suffix != ".py":
        return None
    wanted = _wanted_files(config)
    if wanted is not None and collection_path not in wanted:
        return True
    return (config.getoption("--alone") and "mark.alone" not in collection_path.read_text()) or None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.getoption("--counts-to")
    if counts:
        parts, _ = terminalreporter.build_summary_stats_line()
        Path(counts).write_text(", ".join(text for text, _ in parts) + "\n")
    file = config.getoption("--failed-to")
    if not file:
        return
    reports = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
    names = sorted({report.nodeid.partition("::")[0] for report in reports})
    Path(file).write_text("".join(f"{name}\n" for name in names))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = _wanted_files(config)
    if wanted is not None:
        items[:] = [item for item in items if item.path in wanted]
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if not is_worker and not config.getoption("--alone"):
        return
    config.hook.pytest_deselected(items=[item for item in items if _is(item, "alone") == is_worker])
    items[:] = [item for item in items if _is(item, "alone") != is_worker]
    turns: dict[str, int] = {}
    for item in items:
        group = group_of(item.nodeid)
        for mark in ("vllm", "images"):
            if _is(item, mark) and group != mark:
                raise pytest.UsageError(f"{item.nodeid} is marked {mark}, and its name does not say so")
        turns[group] = min(_turn(item), turns.get(group, _turn(item)))
    items.sort(key=lambda item: turns[group_of(item.nodeid)])


def _wanted_files(config: pytest.Config) -> set[Path] | None:
    listed = config.getoption("--only-files")
    return {config.rootpath / name for name in Path(listed).read_text().split()} if listed else None


def _turn(item: pytest.Item) -> int:
    marks = ("images", "vllm", "slow", "cluster")
    return next((turn for turn, mark in enumerate(marks) if _is(item, mark)), len(marks))


def _is(item: pytest.Item, mark: str) -> bool:
    return item.get_closest_marker(mark) is not None  # a keyword may be the name of a folder, too
