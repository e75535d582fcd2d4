import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from cluster.commands.chat import Chat, converse

Reply = Callable[[dict[str, Any]], Iterator[dict[str, Any] | str]]


class Router:
    """A real HTTP server that answers as `reply` says, and keeps the bodies that it was sent."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.reply: Reply = lambda body: answer("Hello", " there")
        self.status = 200
        self.gone = threading.Event()
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.respond(b'{"data": [{"id": "toy_model"}]}')

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                router.bodies.append(body)
                if router.status != 200:
                    self.respond(b'{"error": {"message": "no replica is ready"}}')
                    return
                self.send_response(200)
                self.send_header("x-kvasir-replica", "replica-7")
                self.end_headers()
                try:
                    for chunk in router.reply(body):
                        data = chunk if isinstance(chunk, str) else json.dumps(chunk)
                        self.wfile.write(f"data: {data}\n\n".encode())
                        self.wfile.flush()
                except OSError:
                    router.gone.set()

            def respond(self, content: bytes) -> None:
                self.send_response(router.status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


def answer(*texts: str, **details: int) -> Iterator[dict[str, Any] | str]:
    for text in texts:
        yield {"choices": [{"delta": {"content": text}}]}
    usage = {"prompt_tokens": 50, "completion_tokens": 2}
    yield {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 48} | details}}
    yield "[DONE]"


@pytest.fixture
def router() -> Iterator[Router]:
    router = Router()
    thread = threading.Thread(target=router.server.serve_forever)
    thread.start()
    yield router
    router.server.shutdown()
    thread.join()
    router.server.server_close()


@pytest.fixture
def chat(router: Router) -> Iterator[Chat]:
    with httpx.Client(base_url=router.url, trust_env=False, timeout=60) as client:
        yield Chat(client, "toy_model", io.StringIO())


def shown(chat: Chat) -> str:
    assert isinstance(chat.output, io.StringIO)
    return chat.output.getvalue()


def test_an_answer_is_followed_by_the_line_that_says_what_it_cost(chat: Chat) -> None:
    converse(chat, io.StringIO("Hi\n"))
    text, line = shown(chat).splitlines()
    assert text == "Hello there"
    assert line.startswith("replica-7 · prompt 50 tokens · cached 48, computed 2 · TTFT ")
    assert line.endswith(" tokens/s")


def test_history_system_message_user_and_limit_go_along(chat: Chat, router: Router) -> None:
    chat.user, chat.max_tokens = "ada", 5
    converse(chat, io.StringIO("/system Be brief\nHi\n\nAgain\n"))
    assert router.bodies[1]["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello there"},
        {"role": "user", "content": "Again"},
    ]
    assert (router.bodies[1]["user"], router.bodies[1]["max_tokens"]) == ("ada", 5)
    assert router.bodies[1]["stream_options"] == {"include_usage": True}


def test_a_refused_turn_shows_the_routers_message_and_leaves_no_trace(chat: Chat, router: Router) -> None:
    router.status = 503
    converse(chat, io.StringIO("Hi\n"))
    assert shown(chat) == "error 503: no replica is ready\n"
    assert chat.messages == []


def test_an_error_in_the_middle_of_an_answer_is_shown(chat: Chat, router: Router) -> None:
    def broken(body: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
        yield {"choices": [{"delta": {"content": "Hel"}}]}
        yield {"error": {"message": "the replica died"}}

    router.reply = broken
    converse(chat, io.StringIO("Hi\n"))
    assert "the replica died" in shown(chat)
    assert chat.messages == []


@pytest.mark.timeout(60)  # a busy machine takes its time to start a process
def test_ctrl_c_stops_the_current_answer_only(router: Router) -> None:
    def endless(body: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
        while body["messages"][-1]["content"] == "Endless":
            yield {"choices": [{"delta": {"content": "la "}}]}
        yield from answer("the end")

    router.reply = endless
    command = [sys.executable, "-P", "-m", "cluster.cli", "chat", "--url", f"{router.url}/v1"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("Endless\n")
        assert process.stdout.read(6) == "la la "
        process.send_signal(signal.SIGINT)
        process.stdin.write("Hi\n/quit\n")
        process.stdin.close()
        said = process.stdout.read()
    assert process.returncode == 0
    assert "[stopped]" in said
    assert "the end" in said
    assert router.gone.wait(30), "the request was cancelled, not only hidden"
    assert [message["role"] for message in router.bodies[1]["messages"]] == ["user", "assistant", "user"]
