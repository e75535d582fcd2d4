"""The page and the tables that runs are shown by."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from loadtests.reports.comparison import FIGURES, compare, in_ratio, in_units, ratio, verdict
from loadtests.reports.html_page import page
from loadtests.reports.markdown import markdown
from loadtests.reports.report import RequestRecord, Slo
from loadtests.reports.run_file import Run
from tests.loadtests.run_builder import random_run, run_info

SLO = Slo(2.0)
VOID = {"meta", "br"}
HOSTILE = "</title></style><script>alert('x')</script>&amp;|`*_\n# <img src=x onerror=alert(1)>"

FEW = [(f"{policy}.json", random_run(seed, policy=policy)) for seed, policy in ((1, "random"), (2, "kvasir"))]
MANY = [
    (f"{test}-{policy}-{seed}.json.gz", random_run(seed, policy=policy, test=test))
    for test in ("chat", "rag")
    for policy in ("random", "lmetric", "kvasir")
    for seed in (1, 2, 3)
]
FAILED = RequestRecord(arrival_seconds=9.0, num_input_tokens=100, e2e_seconds=0.1, error="refused (429)")
SILENT = RequestRecord(
    arrival_seconds=9.0, num_input_tokens=100, num_output_tokens=1, ttft_seconds=0.1, e2e_seconds=0.2
)
INSTANT = replace(SILENT, arrival_seconds=0.0, ttft_seconds=0.0, e2e_seconds=0.0)
POOR = {
    "no records": (),
    "no success": (FAILED,) * 3,
    "no usage": (SILENT,) * 3,
    "one request": (SILENT,),
    "no time": (INSTANT,),
    "answered at once": (replace(INSTANT, arrival_seconds=9.0),),
    "warm-up only": (replace(SILENT, arrival_seconds=1.0),),
}


class Checked(HTMLParser):
    """Every tag is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


@pytest.mark.parametrize("runs", [FEW, MANY], ids=["few", "many"])
def test_the_page_holds_every_run_and_every_figure(runs: list[tuple[str, Run]]) -> None:
    sets = compare(runs, SLO)
    found = Checked(page(sets, SLO))
    for name, run in runs:
        assert name in found.texts
        assert run.info.commit in found.text and run.info.machine in found.text
        assert run.info.command in found.text and run.info.started_at[:19].replace("T", " ") in found.texts
    for run_set in sets:
        assert any(verdict(run_set) in text for text in found.texts)
        for variant in run_set.variants:
            for named in variant.runs:
                assert named.figures.reconciliation is not None
                assert named.figures.reconciliation.verdict in found.texts
            for figure in FIGURES:
                if (spread := variant.spread(figure)) is not None:
                    assert in_units(spread.median, figure.unit) in found.texts, figure.label
                factor = ratio(figure, variant, run_set.baseline)
                if factor and figure.wants and variant is not run_set.baseline:
                    assert in_ratio(factor) in found.texts
    for tenant in ("tenant-0", "tenant-1", "tenant-2"):
        assert tenant in found.texts


@pytest.mark.parametrize("runs", [FEW, MANY], ids=["few", "many"])
def test_the_page_needs_nothing_besides_itself(runs: list[tuple[str, Run]]) -> None:
    text = page(compare(runs, SLO), SLO)
    found = Checked(text)
    for tag, attributes in found.tags:
        assert tag not in ("script", "link", "img", "iframe", "object")
        assert not [name for name in attributes if name == "src" or name.startswith("on")]
        assert (attributes.get("href") or "#").startswith("#")
    assert "http:" not in text and "https:" not in text and "@import" not in text and "url(" not in text


def hostile_runs() -> list[tuple[str, Run]]:
    records = tuple(
        replace(
            each,
            tenant=HOSTILE + str(each.tenant),
            reason=HOSTILE,
            replica=HOSTILE,
            error=each.error and HOSTILE,
        )
        for each in random_run().records
    )
    words = dict.fromkeys(("test", "policy", "engine", "command", "commit", "machine", "started_at"), HOSTILE)
    info = run_info(**words, workload={HOSTILE: HOSTILE}, notes=(HOSTILE,))
    return [
        (HOSTILE, Run(info, records, (), None)),
        (HOSTILE, Run(replace(info, policy="b"), records, (), None)),
    ]


def test_what_a_run_file_holds_is_text_on_the_page() -> None:
    ours, theirs = Checked(page(compare(FEW, SLO), SLO)), Checked(page(compare(hostile_runs(), SLO), SLO))
    assert {tag for tag, _ in theirs.tags} <= {tag for tag, _ in ours.tags}
    assert "<script>" in theirs.text


def test_what_a_run_file_holds_ends_no_cell_and_is_no_markup_in_the_tables() -> None:
    text = markdown(compare(hostile_runs(), SLO))
    for line in text.splitlines():
        outside_of_code = re.sub(r"(`+) .*? \1|`[^`]*`", "", line)
        assert not re.search(r"(?<!\\)<", outside_of_code), line
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert len([line for line in text.splitlines() if line.startswith("#")]) == 1


@pytest.mark.parametrize("what", POOR)
@pytest.mark.parametrize("is_next_to_a_good_run", [False, True])
def test_poor_runs_have_a_page_too(what: str, is_next_to_a_good_run: bool) -> None:
    runs = [("poor.json", Run(run_info(policy="random"), POOR[what], (), None))]
    if is_next_to_a_good_run:
        runs += [("good.json", random_run())]
    sets = compare(runs, SLO)
    assert "poor.json" in Checked(page(sets, SLO)).texts
    assert "poor.json" in markdown(sets)
