"""How `pytest -n` shares the tests out: a file to one worker, what takes longest first, some not at all.

A worker loads a file when it runs it, so no file is loaded twice. Also lists which files have failed, so that
`./kvasir test` can run them again.

The `--dist loadgroup` of xdist does not share out: it writes groups into the names of tests, which pytest 9
ignores without a word. So groups are made of the names that tests have anyway.
"""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

CLIENTS = "tests/clients/"
OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
MARKS = ("images", "vllm", "slow", "cluster")
"""Of what takes longest, in that order."""

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


class LazyFile(pytest.File):
    """A file of tests of which only the name is known yet."""

    def collect(self) -> Iterator[pytest.Item]:
        tests = LazyTests.from_parent(self, name=self.name, nodeid=self.nodeid)
        tests.add_marker(pytest.mark.timeout(0))  # each test in it has its own
        yield tests


class LazyTests(pytest.Item):
    """All tests of a file, as the one item that a worker is given."""

    def runtest(self) -> None:
        raise NotImplementedError("its tests run one by one")

    def run_each(self, nextitem: pytest.Item | None) -> None:
        """Load the file and run its tests, as pytest would have done it."""
        session, hook = self.session, self.config.hook
        assert self.parent is not None and self.parent.parent is not None
        file = pytest.Module.from_parent(self.parent.parent, path=self.path)
        items = list(session.genitems(file))
        hook.pytest_collection_modifyitems(session=session, config=self.config, items=items)
        place = session.items.index(self)
        for item, following in zip(items, [*items[1:], nextitem], strict=False):
            session.items[place] = item  # xdist expects reports of the item that it finds there
            hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
        session.items[place] = self
        if not items:
            session._setupstate.teardown_exact(
                nextitem
            )  # what the test before has left for one of this folder


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.File | None:
    """Arguments that name single tests need the files loaded."""
    if not _is_worker() or any("::" in argument for argument in parent.config.args):
        return None
    return LazyFile.from_parent(parent, path=module_path)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not isinstance(item, LazyTests):
        return None
    item.run_each(nextitem)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """xdist has counted files, of which all tests may have been deselected."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    is_shared_out = reporter is not None and session.config.getoption("numprocesses", None)
    if is_shared_out and exitstatus == 0 and not any(reporter.getreports(each) for each in OUTCOMES):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """What is selected by mark or name are tests; a file that is not loaded yet is left as it is."""
    wanted = _wanted_files(config)
    if wanted is not None:
        items[:] = [item for item in items if item.path in wanted]
    lazy = [item for item in items if isinstance(item, LazyTests)]
    if lazy:
        items.clear()
        yield
        items[:] = _in_turns(lazy)
        return
    yield
    if not _is_worker() and not config.getoption("--alone"):
        return
    config.hook.pytest_deselected(items=[item for item in items if _is(item, "alone") == _is_worker()])
    items[:] = [item for item in items if _is(item, "alone") != _is_worker()]
    for item in items:
        for mark in ("vllm", "images"):
            if _is(item, mark) and group_of(item.nodeid) != mark:
                raise pytest.UsageError(f"{item.nodeid} is marked {mark}, and its name does not say so")


def _in_turns(files: list[LazyTests]) -> list[LazyTests]:
    """What takes longest first, and after each two that take a moment: long ones wait more than they work."""
    turns: dict[str, int] = {}
    for file in files:
        group, turn = group_of(file.nodeid), _turn(file.path.read_text())
        turns[group] = min(turn, turns.get(group, turn))
    ordered = sorted(files, key=lambda file: turns[group_of(file.nodeid)])
    num_long = sum(turns[group_of(file.nodeid)] < len(MARKS) for file in files)
    short = iter(ordered[num_long:])
    mixed = [each for long in ordered[:num_long] for each in (long, *itertools.islice(short, 2))]
    return [*mixed, *short]


def _wanted_files(config: pytest.Config) -> set[Path] | None:
    listed = config.getoption("--only-files")
    return {config.rootpath / name for name in Path(listed).read_text().split()} if listed else None


def _turn(text: str) -> int:
    return next((turn for turn, mark in enumerate(MARKS) if f"mark.{mark}" in text), len(MARKS))


def _is_worker() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ


def _is(item: pytest.Item, mark: str) -> bool:
    return item.get_closest_marker(mark) is not None  # a keyword may be the name of a folder, too
