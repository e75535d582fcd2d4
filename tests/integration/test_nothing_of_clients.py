"""What clients write is found in no log and in no span, whatever becomes of their requests.

But for the trace state of a client that has a trace: it was written for the collector, and goes only there.
"""

import contextlib
import json
import socket

import httpx
import pytest

from loadtests.stacks.local_stack import LocalStack, local_stack
from tests.integration.observe import wait_until
from tests.otlp_collector import Collector, collector

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

PROMPT, KEY, SALT, USER, ADAPTER = "zebrafalcon", "quartzotter", "velvetcomet", "mangoglacier", "cobaltheron"
HEADER, PATH = "umbrellafjord", "tulipanchor"
STATE, BROKEN_STATE = "lanternwalrus", "saffronbadger"
MARKERS = (PROMPT, KEY, SALT, USER, ADAPTER, HEADER, PATH)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

REPLICA = {
    "engine": "simulated",
    "model_name": "toy",
    "num_blocks": 4096,
    "context_length": 4096,
    "log_level": "debug",
}
ROUTER = {"log_level": "debug", "log_requests": True, "max_body_bytes": 100_000}


def chat(**changes: object) -> dict[str, object]:
    return {
        "model": "toy",
        "messages": [{"role": "system", "content": PROMPT}, {"role": "user", "content": f"{PROMPT}? " * 20}],
        "prompt_cache_key": KEY,
        "cache_salt": SALT,
        "user": USER,
        "safety_identifier": USER,
        "max_tokens": 8,
        **changes,
    }


def completion(**changes: object) -> dict[str, object]:
    return {"model": "toy", "prompt": [PROMPT, PROMPT + "!"], "user": USER, "max_tokens": 4, **changes}


REQUESTS: list[tuple[int, str, object]] = [
    (200, CHAT, chat()),
    (200, CHAT, chat(stream=True, n=2, stop=[PROMPT], metadata={"note": PROMPT})),
    (200, COMPLETIONS, completion(stop=PROMPT)),
    (400, COMPLETIONS, completion(suffix=PROMPT)),
    (200, "/tokenize", {"model": "toy", "prompt": PROMPT}),
    (201, "/v1/caches", {"model": "toy", "prompt": PROMPT * 9, "name": KEY, "cache_salt": SALT}),
    (404, COMPLETIONS, completion(cache=PROMPT)),
    (200, f"/explain{CHAT}", chat()),
    (404, CHAT, chat(model=ADAPTER)),
    (404, COMPLETIONS, completion(model=f"toy:{ADAPTER}")),
    (404, "/tokenize", {"model": ADAPTER, "prompt": PROMPT}),
    (400, CHAT, chat(temperature=PROMPT)),
    (400, CHAT, chat(temperature=1e9)),
    (400, CHAT, chat(cache_salt=f"@{SALT}")),
    (400, CHAT, chat(user=[USER])),
    (400, CHAT, chat(prompt_cache_key={KEY: KEY})),
    (400, CHAT, chat(messages=[{"role": PROMPT, "content": PROMPT}])),
    (400, CHAT, chat(messages=[{"role": "user", "content": [{"type": PROMPT, "text": PROMPT}]}])),
    (400, CHAT, chat(logit_bias={PROMPT: 1})),
    (400, CHAT, chat(n=10_000)),
    (400, CHAT, f'{{"model": "toy", "messages": "{PROMPT}'),
    (400, COMPLETIONS, completion(prompt=f"{PROMPT} " * 5000)),
    (413, CHAT, chat(padding=PROMPT * 20_000)),
    (404, f"/v1/{PATH}?{PATH}={PATH}", {"prompt": PROMPT}),
]

HEADERS = {
    "authorization": f"Bearer {HEADER}",
    "user-agent": HEADER,
    "x-request-id": f"{HEADER} {HEADER}",
    "traceparent": f"00-{HEADER}",
    "tracestate": f"{HEADER}={HEADER}",
    "baggage": f"{HEADER}={HEADER}",
}


def with_trace_state(state: str) -> dict[str, str]:
    return {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": state}


def leave_early(stack: LocalStack) -> None:
    """A client that goes before its answer is there, and one that goes in the middle of its body."""
    body = json.dumps(chat(stream=True, max_tokens=2000)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    for part in (head + body, head + body[:-20]):
        with socket.create_connection(("127.0.0.1", stack.port)) as connection:
            connection.sendall(part)
            if part.endswith(body):
                connection.recv(10)


def send_everything(stack: LocalStack, receiver: Collector) -> None:
    with httpx.Client(base_url=stack.url, headers=HEADERS, timeout=60) as client:
        statuses = []
        for _, path, body in REQUESTS:
            content = body if isinstance(body, str) else json.dumps(body)
            statuses.append(client.post(path, content=content).status_code)
        assert statuses == [status for status, _, _ in REQUESTS], stack.logs()
        for state in (f"{STATE}={STATE}", f"{BROKEN_STATE} {BROKEN_STATE}"):
            assert client.post(CHAT, json=chat(), headers=with_trace_state(state)).status_code == 200
        assert client.get(f"{CHAT}?{PATH}").status_code == 405
        with socket.create_connection(("127.0.0.1", stack.port)) as connection:
            connection.sendall(f"{HEADER} {PATH} nonsense\r\n\r\n".encode())
            connection.recv(10)
        leave_early(stack)
        # A replica that is killed takes with it what it has not sent.
        receiver.wait(lambda: any(span.name == "replica request" for span in receiver.spans))
        with client.stream("POST", CHAT, json=chat(stream=True, max_tokens=200)) as answer:
            stack.kill(answer.headers["x-kvasir-replica"])
            answer.read()
        for name in ("replica-0", "replica-1"):
            stack.kill(name)
        # Before the router has noticed, or after.
        assert client.post(CHAT, json=chat()).status_code in (500, 503)
        assert client.post(COMPLETIONS, json=completion()).status_code in (500, 503)


@pytest.mark.parametrize("log_format", [pytest.param("text", marks=pytest.mark.slow), "json"])
def test_no_word_of_a_client_is_in_a_log_or_a_span(log_format: str) -> None:
    with collector() as receiver:
        shared = {"log_format": log_format, "otlp_endpoint": receiver.url}
        has_process = {"engine_process": log_format == "text"}
        with local_stack(
            num_replicas=2,
            replica_settings={**REPLICA, **shared, **has_process},
            router_settings={**ROUTER, **shared},
        ) as stack:
            send_everything(stack, receiver)
            router_log = stack.run_directory / "router.log"
            num_requests = len([path for _, path, _ in REQUESTS if path in (CHAT, COMPLETIONS)]) + 8
            wait_until(
                lambda: router_log.read_text().count("router.observation.access_log") >= num_requests,
                "every line",
            )
            with contextlib.suppress(KeyError):
                stack.terminate("router")
            logs = {path.name: path.read_text() for path in stack.run_directory.glob("*.log")}
    spans = b"".join(receiver.bodies)
    assert logs["replica-0.log"].count("a request was taken") + logs["replica-1.log"].count(
        "a request was taken"
    )
    for marker in (*MARKERS, STATE, BROKEN_STATE):
        for name, text in logs.items():
            assert marker not in text.lower(), (marker, name)
        assert (marker.encode() in spans.lower()) is (marker == STATE), marker
    if log_format == "json":
        lines = [json.loads(line) for line in logs["router.log"].splitlines()]
        ended = [line for line in lines if line["logger"] == "router.observation.access_log"]
        assert {line["status"] for line in ended} >= {200, 400, 404, 405, 413, 499}
        assert all(line["message"] == "request" and line["request_id"] for line in ended)
        taken = [json.loads(line) for line in logs["replica-0.log"].splitlines()]
        assert {line["replica"] for line in taken} == {"replica-0"}
        known_ids = {line["request_id"] for line in ended}
        assert {line["request_id"] for line in taken if line["message"] == "a request was taken"} <= known_ids
