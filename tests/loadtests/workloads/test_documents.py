import base64
import json
from collections import Counter, defaultdict
from typing import Any

from loadtests.workloads import TraceRequest, Workload, documents, ideal_hits, rag
from loadtests.workloads.chat_bodies import ChatBodies
from loadtests.workloads.pages import page_png
from replicas.protocol.images import read_size

URL = "data:image/png;base64,"


def bodies_of(workload: Workload) -> list[dict[str, Any]]:
    made = ChatBodies("m", workload.block_tokens, 1)
    return [json.loads(made.body(request)) for request in workload.requests]


def urls_of(body: dict[str, Any]) -> list[str]:
    return [
        part["image_url"]["url"]
        for message in body["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]


def document_of(request: TraceRequest) -> str:
    """The first page's name, without the tenant's."""
    return request.images[0].content.partition("/")[2]


def test_the_pages_come_before_the_first_question_in_one_message_of_the_user() -> None:
    workload = documents(seed=1)
    for request, body in zip(workload.requests, bodies_of(workload), strict=True):
        roles = [message["role"] for message in body["messages"]]
        assert roles == ["system", *["user", "assistant"] * (len(roles) // 2 - 1), "user"]
        first = body["messages"][1]["content"]
        assert [part["type"] for part in first] == ["image_url"] * len(request.images) + ["text"]
        assert all(isinstance(message["content"], str) for message in body["messages"][2:])
        for message, url in zip(request.messages[1:], urls_of(body), strict=False):
            assert message.page is not None
            content = base64.b64decode(url.removeprefix(URL), validate=True)
            assert content == page_png(1, message.content, message.page)
            assert read_size(content).width == message.page.width


def test_a_later_turn_brings_the_pages_and_the_turns_before_it_again() -> None:
    workload = documents(seed=2)
    last: dict[str, list[dict[str, Any]]] = {}
    num_later = 0
    for request, body in zip(workload.requests, bodies_of(workload), strict=True):
        messages: list[dict[str, Any]] = body["messages"]
        if earlier := last.get(request.session):
            num_later += 1
            assert messages[: len(earlier)] == earlier
            assert len(messages) == len(earlier) + 2
        last[request.session] = messages
    assert num_later > 20


def test_images_stand_where_the_tokens_of_their_messages_do() -> None:
    for request in documents(seed=3).requests:
        assert 0 < request.num_image_tokens < request.num_input_tokens
        end = request.messages[0].num_tokens
        for image, message in zip(request.images, request.messages[1:], strict=False):
            assert (image.start, image.num_tokens) == (end, message.num_tokens)
            end += image.num_tokens
        assert request.messages[1 + len(request.images)].page is None
    assert not rag(seed=3).has_images


def test_users_ask_about_the_same_documents_the_popular_ones_most() -> None:
    workload = documents(seed=4, qps=20.0, num_documents=8)
    counts: Counter[str] = Counter()
    users: dict[tuple[str | None, str], set[str]] = defaultdict(set)
    for request in workload.requests:
        counts[document_of(request)] += 1
        users[request.tenant, document_of(request)].add(request.user)
    assert counts.most_common(1)[0][0] == "document-0-0"
    assert counts["document-0-0"] > 3 * counts["document-7-0"] > 0
    assert min(map(len, users.values())) > 1
    hits = ideal_hits(workload)
    assert hits.token_hit_rate > 0.8
    assert hits.cross_user_hit_rate > 0.3


def test_tenants_send_the_same_files_and_share_no_id() -> None:
    workload = documents(seed=5, num_documents=1)
    of_tenants: dict[str, tuple[list[str], set[int]]] = {}
    for request, body in zip(workload.requests, bodies_of(workload), strict=True):
        assert body["cache_salt"] == request.tenant
        of_tenants[body["cache_salt"]] = urls_of(body), set(request.prefix_ids)
    (first, first_ids), (second, second_ids) = of_tenants.values()
    assert first == second
    assert not first_ids & second_ids
