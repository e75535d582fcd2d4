"""Bad requests against a real cluster: a clear error, and nothing that stays raised."""

import json
import socket

import httpx
import pytest

from loadtests.stacks.local_stack import LocalStack
from tests.integration.observe import is_idle, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

HELLO = [{"role": "user", "content": "hello"}]
BAD_BODIES: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"{", 400),
    (b"[]", 400),
    (b'{"model": "toy", "messages": [{"role": "user", "content": "\xff\xfe"}]}', 400),
    *(
        (json.dumps({"model": "toy", "messages": HELLO} | change).encode(), status)
        for change, status in (
            ({"model": "nobody"}, 404),
            ({"model": 3}, 400),
            ({"messages": []}, 400),
            ({"messages": "hello"}, 400),
            ({"messages": [{"role": "wizard", "content": "hello"}]}, 400),
            ({"messages": [{"role": "user", "content": "word " * 40_000}]}, 400),
            ({"max_tokens": -1}, 400),
            ({"max_tokens": 10**9}, 400),
            ({"temperature": 2.5}, 400),
            ({"temperature": "hot"}, 400),
            ({"top_p": 1.5}, 400),
            ({"n": 0}, 400),
            ({"n": 10_000}, 400),
            ({"stop": ["a", "b", "c", "d", "e"]}, 400),
            ({"stop": [""]}, 400),
            ({"logprobs": True, "top_logprobs": 21}, 400),
            ({"top_logprobs": 2}, 400),
            ({"logit_bias": {"99999999": 1}}, 400),
            ({"stream_options": {"include_usage": True}}, 400),
            ({"cache_salt": "a/b"}, 400),
        )
    ),
]


@pytest.mark.parametrize(("body", "status"), BAD_BODIES)
def test_a_bad_body_is_answered_in_the_shape_of_openai_and_leaves_nothing_raised(
    simulated_stack: LocalStack, body: bytes, status: int
) -> None:
    answer = httpx.post(simulated_stack.url + "/v1/chat/completions", content=body, timeout=60)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    wait_until(lambda: is_idle(simulated_stack), "everything given back")


def test_a_body_over_the_limit_is_refused_before_it_is_read(simulated_stack: LocalStack) -> None:
    with socket.create_connection(("127.0.0.1", simulated_stack.port)) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n{"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
    wait_until(lambda: is_idle(simulated_stack), "everything given back")


@pytest.mark.parametrize("sent", [0.2, 0.9])
def test_a_client_that_vanishes_while_it_sends_leaves_nothing_raised(
    simulated_stack: LocalStack, sent: float
) -> None:
    body = json.dumps({"model": "toy", "messages": HELLO}).encode()
    with socket.create_connection(("127.0.0.1", simulated_stack.port)) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body[: int(len(body) * sent)])
    wait_until(lambda: is_idle(simulated_stack), "everything given back")


def test_a_client_that_leaves_in_mid_stream_stops_the_generation(simulated_stack: LocalStack) -> None:
    body = {"model": "toy", "messages": HELLO, "max_tokens": 4000, "stream": True, "ignore_eos": True}
    url = simulated_stack.url + "/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        for _ in range(5):
            next(lines)
        assert not is_idle(simulated_stack)
    # 4,000 tokens at 8 ms would take half a minute; the generation ends when its reader does.
    wait_until(lambda: is_idle(simulated_stack), "the generation stopped", seconds=20)
