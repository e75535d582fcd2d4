from dataclasses import replace

from loadtests.load.attribution import attribute
from loadtests.reports.report import RequestRecord
from loadtests.workloads import TraceRequest, Workload
from loadtests.workloads.generators import PrefixIds

BLOCK = 16
TEMPLATE_TOKENS = 9
"""What a template adds to every prompt."""


class Sent:
    """A workload and its records, one request after another."""

    def __init__(self) -> None:
        self._ids = PrefixIds(BLOCK)
        self.requests: list[TraceRequest] = []
        self.records: dict[int, RequestRecord] = {}

    def add(
        self,
        seconds: float,
        tenant: str | None,
        pieces: dict[str, int],
        *,
        num_cached: int | None,
        num_cross_user: int | None = 0,
        ttft: float | None = 0.1,
        e2e: float = 0.2,
        num_output: int = 8,
    ) -> int:
        num_words = sum(pieces.values())
        segments = [(f"{tenant}/{name}", num_tokens) for name, num_tokens in pieces.items()]
        request = TraceRequest(
            arrival_seconds=seconds,
            num_input_tokens=num_words,
            num_output_tokens=num_output,
            prefix_ids=self._ids.chain(segments),
            user="someone",
            session="s",
            tenant=tenant,
        )
        number = len(self.requests)
        self.requests.append(request)
        self.records[number] = RequestRecord(
            arrival_seconds=seconds,
            num_input_tokens=num_words + TEMPLATE_TOKENS,
            ttft_seconds=ttft,
            e2e_seconds=e2e,
            num_cached_tokens=num_cached,
            num_cross_user_tokens=num_cross_user,
        )
        return number

    def other_tenant(self, number: int) -> int | None:
        workload = Workload("test", BLOCK, tuple(self.requests))
        return attribute(workload, self.records)[number].num_other_tenant_tokens


def test_what_the_same_tenant_sent_before_may_be_cached() -> None:
    sent = Sent()
    sent.add(0.0, "a", {"system": 512, "first": 40}, num_cached=0)
    later = sent.add(1.0, "a", {"system": 512, "second": 40}, num_cached=512)
    assert sent.other_tenant(later) == 0


def test_the_first_request_of_a_tenant_can_have_nothing_cached() -> None:
    sent = Sent()
    sent.add(0.0, "a", {"system": 512, "first": 40}, num_cached=0)
    stolen = sent.add(1.0, "b", {"system": 512, "second": 40}, num_cached=512)
    assert sent.other_tenant(stolen) == 512


def test_what_the_tenant_sent_only_in_part_is_another_ones_beyond_it() -> None:
    sent = Sent()
    sent.add(0.0, "a", {"system": 512, "first": 40}, num_cached=0)
    sent.add(0.0, "b", {"system": 128}, num_cached=0)
    stolen = sent.add(1.0, "b", {"system": 512, "second": 40}, num_cached=512)
    found = sent.other_tenant(stolen)
    assert found is not None
    # The oracle gives away what the template may add, one block, and the earlier answer.
    assert 512 - 128 - TEMPLATE_TOKENS - BLOCK - 8 <= found <= 512 - 128


def test_what_was_sent_after_the_first_token_cannot_be_in_it() -> None:
    sent = Sent()
    early = sent.add(0.0, "a", {"system": 512, "first": 40}, num_cached=512, ttft=0.3)
    sent.add(0.4, "a", {"system": 512, "second": 40}, num_cached=0)
    assert sent.other_tenant(early) == 512
    sent.requests[1] = replace(sent.requests[1], arrival_seconds=0.2)
    sent.records[1] = replace(sent.records[1], arrival_seconds=0.2)
    assert sent.other_tenant(early) == 0


def test_an_answer_may_be_the_beginning_of_the_next_turn() -> None:
    sent = Sent()
    sent.add(0.0, "a", {"system": 64, "q1": 36}, num_cached=0, num_output=200)
    cached = 64 + 36 + 150
    turn = sent.add(9.0, "a", {"system": 64, "q1": 36, "answer": 200, "q2": 30}, num_cached=cached)
    assert sent.other_tenant(turn) == 0


def test_a_repeated_prompt_may_be_cached_whole() -> None:
    sent = Sent()
    sent.add(0.0, "a", {"prompt": 100}, num_cached=0)
    again = sent.add(1.0, "a", {"prompt": 100}, num_cached=96)
    assert sent.other_tenant(again) == 0


def test_own_tokens_are_what_the_server_does_not_count_for_others() -> None:
    sent = Sent()
    sent.add(0.0, "a", {"system": 512}, num_cached=0)
    sent.add(1.0, "a", {"system": 512, "q": 20}, num_cached=512, num_cross_user=480)
    sent.add(2.0, "a", {"system": 512, "q": 20}, num_cached=512, num_cross_user=None)
    sent.add(3.0, "a", {"system": 512, "q": 20}, num_cached=None, num_cross_user=None)
    records = attribute(Workload("test", BLOCK, tuple(sent.requests)), sent.records)
    assert [records[number].num_own_tokens for number in range(4)] == [0, 32, None, None]
    assert records[3].num_other_tenant_tokens is None
