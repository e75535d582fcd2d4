"""Images that routers send to a replica, over real gRPC: what is taken, what is refused, and what is left."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from replicas.observation.media_metrics import ImageMetrics
from replicas.protocol.blocks import BlockHash
from replicas.protocol.images import media_hash
from replicas.protocol.media import MAX_MEDIA_BYTES, MEDIA_PART_BYTES, ImagePart, ImageQuery, ImageQueryAnswer
from replicas.protocol.wire import decode_media_taken, encode
from replicas.serving.image_service import MAX_BYTES, MAX_CALLS, ImageService
from tests.replicas.builders import ROOT
from tests.router.scripted_replica import eventually

LARGE = os.urandom(2 * MEDIA_PART_BYTES + 5)


class Desk:
    """A desk behind a gRPC server of its own; its engine answers at once unless it is told to wait."""

    def __init__(self, *, takes_images: bool = True) -> None:
        self.registry = CollectorRegistry()
        self.desk = ImageService(self, ImageMetrics(self.registry), takes_images=takes_images)
        self.questions: list[ImageQuery] = []
        self.num_asked = 0
        self.waits = False
        self.answer: dict[str, Any] = {}

    def take_media(self, question: ImageQuery) -> None:
        self.questions.append(question)
        self.num_asked += 1
        if not self.waits:
            self.answer_all()

    def answer_all(self) -> None:
        questions, self.questions = self.questions, []
        for question in questions:
            answer = self.answer or {"content_hash": media_hash(question.root, question.content)}
            self.desk.take([ImageQueryAnswer(question.number, **answer)])

    def count(self, outcome: str) -> float | None:
        return self.registry.get_sample_value("replica_images_total", {"outcome": outcome})

    async def open(self) -> None:
        self.server = grpc.aio.server()
        method = grpc.stream_unary_rpc_method_handler(self.desk.serve, response_serializer=encode)
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", {"Put": method}),))
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.put = self.channel.stream_unary("/t/Put", None, None)

    async def close(self) -> None:
        await self.channel.close()
        await self.server.stop(None)
        await eventually(lambda: self.desk.num_bytes == self.desk.num_calls == 0)
        assert not self.desk._asked


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk()
    await desk.open()
    yield desk
    await desk.close()


def parts_of(
    content: bytes, *, root: BlockHash | None = ROOT, num_bytes: int | None = None
) -> list[bytes | ImagePart]:
    cuts = range(0, max(1, len(content)), MEDIA_PART_BYTES)
    parts: list[bytes | ImagePart] = [ImagePart(content[at : at + MEDIA_PART_BYTES]) for at in cuts]
    parts[0] = ImagePart(
        content[:MEDIA_PART_BYTES], root or b"", len(content) if num_bytes is None else num_bytes
    )
    return parts


async def sending(parts: Sequence[bytes | ImagePart]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part if isinstance(part, bytes) else encode(part)


async def refusal(desk: Desk, parts: Sequence[bytes | ImagePart], timeout: float | None = 30) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await desk.put(sending(parts), timeout=timeout)
    return refused.value


@pytest.mark.parametrize("content", [b"x", LARGE, bytes(MEDIA_PART_BYTES)])
async def test_what_has_come_whole_is_named_by_its_hash(desk: Desk, content: bytes) -> None:
    taken = decode_media_taken(await desk.put(sending(parts_of(content)), timeout=30))
    assert taken.content_hash == media_hash(ROOT, content)
    assert desk.count("taken") == 1
    assert desk.registry.get_sample_value("replica_image_bytes_total") == len(content)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (parts_of(LARGE, num_bytes=len(LARGE) + 1), "less has come"),
        (parts_of(LARGE, num_bytes=len(LARGE) - 1), "more has come"),
        (parts_of(LARGE, root=None), "no root"),
        (parts_of(b"x", root=BlockHash(b"short")), "no root"),
        (parts_of(b"", num_bytes=0), "no root and no size"),
        ([], "less has come"),
        ([b"no part"], "not a ImagePart"),
        ([encode([b"x", ROOT, MAX_MEDIA_BYTES + 1])], "not a ImagePart"),
        ([encode([bytes(MEDIA_PART_BYTES + 1), ROOT, MEDIA_PART_BYTES + 1])], "not a ImagePart"),
    ],
)
async def test_what_is_not_as_it_says_is_refused(desk: Desk, parts: Any, words: str) -> None:
    error = await refusal(desk, parts)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and words in error.details()
    assert not desk.num_asked and desk.count("taken") == 0


async def test_what_the_engine_says_of_it_is_passed_on(desk: Desk) -> None:
    desk.answer = {"problem": "the image cannot be read"}
    error = await refusal(desk, parts_of(b"x"))
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "the image cannot be read")
    desk.answer = {"is_full": True}
    assert (await refusal(desk, parts_of(b"x"))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (desk.count("unreadable"), desk.count("full"), desk.count("taken")) == (1, 1, 0)


@pytest.mark.parametrize("timeout", [None, 600.0])
async def test_a_call_without_a_near_deadline_is_refused(desk: Desk, timeout: float | None) -> None:
    assert (await refusal(desk, parts_of(b"x"), timeout)).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_model_of_text_takes_none() -> None:
    desk = Desk(takes_images=False)
    await desk.open()
    assert (await refusal(desk, parts_of(b"x"))).code() is grpc.StatusCode.FAILED_PRECONDITION
    await desk.close()


async def test_an_engine_that_never_answers_holds_a_call_until_its_deadline(desk: Desk) -> None:
    desk.waits = True
    error = await refusal(desk, parts_of(LARGE), 0.3)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (desk.desk.num_bytes, desk.desk.num_calls) == (len(LARGE), 1), "the engine still has it"
    desk.answer_all()  # too late for anybody
    assert (desk.desk.num_bytes, desk.desk.num_calls) == (0, 0)
    desk.waits = False
    assert decode_media_taken(await desk.put(sending(parts_of(b"y")), timeout=30))


async def test_so_many_at_once_and_so_many_bytes_and_no_more(desk: Desk) -> None:
    desk.waits = True
    most = MAX_BYTES // MAX_MEDIA_BYTES

    async def only_announced() -> AsyncIterator[bytes]:
        yield encode(ImagePart(b"x", ROOT, MAX_MEDIA_BYTES))
        await asyncio.Event().wait()

    calls = [desk.put(only_announced(), timeout=30) for _ in range(most)]
    await eventually(lambda: desk.desk.num_bytes == most * MAX_MEDIA_BYTES)
    error = await refusal(desk, parts_of(b"x", num_bytes=MAX_MEDIA_BYTES))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    small = [desk.put(sending(parts_of(b"x")), timeout=30) for _ in range(MAX_CALLS - most)]
    await eventually(lambda: len(desk.questions) == len(small))
    assert (await refusal(desk, parts_of(b"x"))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    desk.answer_all()
    for call in small:
        decode_media_taken(await call)
    for call in calls:
        call.cancel()
