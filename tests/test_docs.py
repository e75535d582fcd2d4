"""Documents say what is so: the pages made from the code are current, and commands, files and links exist."""

import argparse
import ast
import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from cluster.cli import _parser
from replicas.config import ENVIRONMENT_PREFIX as REPLICA_PREFIX
from replicas.config import ReplicaConfig
from replicas.process.settings import load_settings, old_settings_of, settings_of
from router.config import ENVIRONMENT_PREFIX as ROUTER_PREFIX
from router.config import RouterConfig
from tests.tools import needed_tool

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "loadtests/RESULTS.md", "helm/README.md"),
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").glob("*.md"))),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
OF_THE_TREE = re.compile(
    r"`((?:cluster|router|replicas|loadtests|tests|helm|deploy|docs|requirements)/[\w./-]*\w/?)`"
)
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
MADE_BY_READERS = {"deploy/cluster-secret"}
NOT_ARGUMENTS = {"&&", "|", "|&", ">", ">>", "<", "&", ";", "||", "2>&1"}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def commands_of(page: str) -> Iterator[list[str]]:
    """The words of every command in the page's blocks for a shell, without what the shell takes itself."""
    for language, block in FENCE.findall(text_of(page)):
        if language in ("", "sh", "bash", "console"):
            for line in block.replace("\\\n", " ").splitlines():
                yield from _split(line)


def _split(line: str) -> Iterator[list[str]]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # the inside of a text that goes on for several lines
        return
    command: list[str] = []
    for word in [*words, "&&"]:
        if word not in NOT_ARGUMENTS and "…" not in word:
            command.append(word)
        elif command:
            yield [word for word in command if not re.fullmatch(r"[A-Z_]+=.*|nohup", word)]
            command = []


def inline_commands_of(page: str) -> Iterator[list[str]]:
    prose = FENCE.sub("", text_of(page))
    for code in re.findall(r"`((?:\./)?kvasir [^`]+)`", prose):
        yield from _split(code)


def every_command(*names: str) -> list[tuple[str, list[str]]]:
    found = [(page, words) for page in PAGES for words in commands_of(page) if words]
    return [(page, words) for page, words in found if not names or words[0] in names]


def after(words: Sequence[str], *start: str) -> list[str] | None:
    """What follows `python -m NAME`, wherever that Python is; None for other commands."""
    if len(words) > 2 and Path(words[0]).name.startswith("python") and tuple(words[1:3]) == start:
        return list(words[3:])
    return None


def test_the_pages_that_are_made_from_the_code_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "docs/make_reference.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_command_of_kvasir_has_its_options_in_the_reference() -> None:
    page = text_of("docs/commands.md")
    (group,) = (one for one in _parser({}, "")._actions if isinstance(one, argparse._SubParsersAction))
    assert {"why", "keys"} <= group.choices.keys()
    assert not [name for name in group.choices if f"\n## kvasir {name}" not in page]


def test_every_command_of_kvasir_is_one() -> None:
    found = every_command("./kvasir", "kvasir")
    assert len(found) > 30
    for page, words in found:
        if words[1] == "test":
            paths = [word for word in words[2:] if "/" in word]
            assert all((ROOT / path).exists() for path in paths), (page, words)
        elif words[1] != "docs":
            try:
                _parser({}, words[1]).parse_args(words[1:])
            except SystemExit as ended:
                assert ended.code == 0, (page, words)


@pytest.mark.parametrize("page", PAGES)
def test_options_of_kvasir_in_the_text_exist(page: str) -> None:
    for words in inline_commands_of(page):
        if words[1] in ("test", "docs", "COMMAND"):
            continue
        parser: argparse.ArgumentParser = _parser({}, words[1])
        for word in words[1:]:
            for action in parser._actions:
                if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                    parser = action.choices[word]
        options = {option for action in parser._actions for option in action.option_strings}
        assert {word for word in words if word.startswith("--")} <= options, (page, words)


def test_every_router_and_replica_is_started_with_settings_that_exist() -> None:
    number = 0
    for page, words in every_command():
        for module, config, prefix in (
            ("router", RouterConfig, ROUTER_PREFIX),
            ("replicas", ReplicaConfig, REPLICA_PREFIX),
        ):
            arguments = after(words, "-m", module)
            if arguments is not None:
                number += 1
                load_settings(
                    config, arguments=arguments, environment={}, prefix=prefix, program=page, description=""
                )
    assert number >= 4


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/settings.md"])
def test_old_names_of_settings_are_only_in_their_table(page: str) -> None:
    others = {"max_sequences", *settings_of(ReplicaConfig)}  # a limit of tenants has the first name
    old = old_settings_of(RouterConfig).keys() - others
    assert not old & set(re.findall(r"`(\w+)`", text_of(page)))


def test_every_module_and_script_that_is_run_exists_and_has_its_options() -> None:
    number = 0
    for page, words in every_command():
        if not Path(words[0]).name.startswith("python") or len(words) < 2:
            continue
        if words[1].endswith(".py"):
            source = ROOT / words[1]
        elif words[1] == "-m" and words[2].startswith(("loadtests.", "tests.")):
            spec = importlib.util.find_spec(words[2])
            assert spec is not None and spec.origin is not None, (page, words)
            source = Path(spec.origin)
            if spec.submodule_search_locations is not None:
                source = source.with_name("__main__.py")
        else:
            continue
        number += 1
        text = source.read_text(encoding="utf-8")
        for option in [word for word in words[2:] if word.startswith("--")]:
            assert f'"{option}"' in text, (page, words)
    assert number >= 5


def test_locust_is_given_options_that_it_or_we_have() -> None:
    spec = importlib.util.find_spec("locust")
    assert spec is not None and spec.origin is not None
    known = Path(spec.origin).with_name("argument_parser.py").read_text("utf-8")
    known += (ROOT / "loadtests/load/options.py").read_text("utf-8")
    found = every_command(".venv/bin/locust")
    assert found
    for page, words in found:
        assert (ROOT / words[words.index("-f") + 1]).is_file(), page
        for option in [word for word in words if word.startswith("--")]:
            assert f'"{option}"' in known, (page, option)


def test_files_that_other_programs_are_given_exist() -> None:
    number = 0
    for page, words in every_command("docker", "helm", "kubectl"):
        for option, path in itertools.pairwise(words):
            if option in ("-f", "--values") and path != "mine.yaml":
                assert (ROOT / path).exists(), (page, words)
                number += 1
    assert number >= 5


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    named = set(OF_THE_TREE.findall(text_of(page))) - MADE_BY_READERS
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_way_through_the_code_names_functions_that_exist_and_is_short() -> None:
    rows = re.findall(r"^\| (?:`(\S+\.py)`)? ?\| `(\S+)` \|", text_of("docs/reading.md"), re.MULTILINE)
    path, num_lines = "", 0
    for written, name in rows:
        path = written or path
        node: ast.AST = ast.parse(text_of(path))
        for part in name.split("."):
            named = (each for each in ast.iter_child_nodes(node) if getattr(each, "name", None) == part)
            found = next(named, None)
            assert found is not None, f"{path} has no {name}"
            node = found
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
        num_lines += node.end_lineno - node.lineno + 1
    assert len(rows) > 40
    assert num_lines <= 1200, f"{num_lines} lines are too many to read at once"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    targets = LINK.findall(FENCE.sub("", text_of(page)))
    folder = (ROOT / page).parent
    assert [target for target in targets if not (folder / target).exists()] == []


def test_every_command_that_makes_a_secret_makes_it_for_its_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    compose = [line.removeprefix("#").strip() for line in text_of("deploy/compose.yaml").splitlines()]
    lines = [
        line for page in PAGES for _, block in FENCE.findall(text_of(page)) for line in block.splitlines()
    ]
    made = {line.replace(".venv/bin/python", "python3") for line in [*lines, *compose] if "token_hex" in line}
    assert len(made) >= 5
    for line in made:
        done = subprocess.run(["bash", "-c", f"umask 022; {line}"], cwd=tmp_path, check=False)
        assert done.returncode == 0, line
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 5
    assert [path.name for path in files if path.stat().st_mode & 0o077] == []


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", text_of("mkdocs.yml"), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize(
    ("word", "pages"),
    [
        ("prefix caching", {"docs/index.md", "docs/monitoring.md", "docs/models.md"}),
        ("cache hit rate", {"docs/index.md", "docs/monitoring.md", "docs/loadtests.md"}),
        ("KV-cache-aware routing", {"docs/index.md", "docs/loadtests.md"}),
        ("disaggregated prefill", {"docs/index.md", "docs/prefill-decode.md"}),
        ("autoscaling", {"docs/index.md", "docs/machines.md", "docs/kubernetes.md"}),
    ],
)
def test_the_fields_words_lead_to_the_pages_that_are_about_them(word: str, pages: set[str]) -> None:
    found = {page for page in PAGES if word.lower() in text_of(page).lower()}
    assert pages | {"README.md"} <= found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("material") is None and not os.environ.get("CI"):
        pytest.skip("mkdocs is not installed; ./kvasir docs installs it")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_asks_nothing_of_the_network_and_finds_words(site: Path) -> None:
    for page in site.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r'<(?:script|img|link rel="(?:stylesheet|preconnect)")[^>]*"https?://', text)
    assert "KvasirNoRouter" in (site / "search/search_index.json").read_text("utf-8")


def test_the_site_finds_words_when_it_is_opened_from_the_disk(site: Path) -> None:
    chromium = needed_tool("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"{(site / 'index.html').as_uri()}?q=KvasirNoRouter")
        expect(page.locator(".md-search-result__meta")).to_contain_text("matching document", timeout=30_000)
        browser.close()
