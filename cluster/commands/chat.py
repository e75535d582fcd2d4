"""A chat in the terminal over the HTTP API, with the cache's savings after each answer.

Owns the conversation and its display. Knows only a router's address.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

import httpx

from cluster.commands.refusals import refused
from cluster.errors import ClusterError

HELP = (
    "/reset forgets the conversation, /system TEXT sets the system message, /quit ends it; "
    "Ctrl-C stops an answer"
)
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(slots=True)
class Turn:
    """One answer as it arrived. Times are seconds since the request was sent."""

    text: str = ""
    replica: str = "?"
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_cross_user_tokens: int = 0
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    num_output_tokens: int = 0
    first_seconds: float | None = None
    last_seconds: float = 0.0

    def line(self) -> str:
        """Summarise the turn in one line."""
        parts = [self.replica]
        if self.num_prompt_tokens is not None:
            parts.append(f"prompt {self.num_prompt_tokens} tokens")
        if self.num_prompt_tokens is not None and self.num_cached_tokens is not None:
            computed = self.num_prompt_tokens - self.num_cached_tokens
            parts.append(f"cached {self.num_cached_tokens}{self._origins()}, computed {computed}")
        if self.first_seconds is not None:
            parts.append(f"TTFT {self.first_seconds * 1000:.0f} ms")
        if self.num_output_tokens and self.last_seconds > 0:
            # Over the whole turn: a short answer may arrive all at once, and decoding seem to take no time.
            parts.append(f"{self.num_output_tokens / self.last_seconds:.0f} tokens/s")
        return " · ".join(parts)

    def _origins(self) -> str:
        """Name the owners and tiers of the cached tokens, if that says anything."""
        origins = {
            "by others": self.num_cross_user_tokens,
            "from host memory": self.num_host_tokens,
            "from disk": self.num_disk_tokens,
        }
        worth = [f"{number} {origin}" for origin, number in origins.items() if number]
        return f" ({', '.join(worth)})" if worth else ""


@dataclass(slots=True)
class Chat:
    """A conversation with one model. `user` and `max_tokens`, if given, go with each request."""

    client: httpx.Client
    model: str
    output: TextIO
    user: str | None = None
    max_tokens: int | None = None
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, question: str) -> None:
        """Run one turn: stream the answer, then print its line. A failed turn leaves the history
        unchanged."""
        self.messages.append({"role": "user", "content": question})
        turn = Turn()
        try:
            self._stream(turn)
        except KeyboardInterrupt:
            self._write(" [stopped]")
        except (httpx.HTTPError, ClusterError) as error:
            self.messages.pop()
            self._write(f"{error}\n")
            return
        self.messages.append({"role": "assistant", "content": turn.text})
        dim, plain = (_DIM, _PLAIN) if self.output.isatty() else ("", "")
        self._write(f"\n{dim}{turn.line()}{plain}\n")

    def command(self, line: str) -> bool:
        """Obey a line that starts with a slash. False ends the chat."""
        name, _, argument = line.partition(" ")
        match name:
            case "/quit" | "/exit":
                return False
            case "/reset":
                self.messages.clear()
                self._write("The conversation starts again from the beginning.\n")
            case "/system":
                self.system = argument.strip() or None
                self._write(
                    "The system message is set.\n" if self.system else "The system message is removed.\n"
                )
            case _:
                self._write(HELP + "\n")
        return True

    def _stream(self, turn: Turn) -> None:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {
            "model": self.model,
            "messages": system + self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.user is not None:
            body["user"] = self.user
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        started = time.monotonic()
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                response.read()
                raise refused(f"error {response.status_code}", response)
            turn.replica = response.headers.get("x-kvasir-replica", "?")
            for chunk in _events(response):
                self._take(chunk, turn, time.monotonic() - started)

    def _take(self, chunk: dict[str, Any], turn: Turn, seconds: float) -> None:
        if "error" in chunk:
            raise ClusterError(f"error: {chunk['error'].get('message', chunk['error'])}")
        for choice in chunk.get("choices", ()):
            text = choice.get("delta", {}).get("content")
            if text:
                turn.first_seconds = seconds if turn.first_seconds is None else turn.first_seconds
                turn.last_seconds = seconds
                turn.text += text
                self._write(text)
        usage = chunk.get("usage")
        if usage:
            turn.num_prompt_tokens = usage["prompt_tokens"]
            turn.num_output_tokens = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            turn.num_cached_tokens = details.get("cached_tokens")
            turn.num_cross_user_tokens = details.get("cross_user_cached_tokens", 0)
            turn.num_host_tokens = details.get("host_cached_tokens", 0)
            turn.num_disk_tokens = details.get("disk_cached_tokens", 0)

    def _write(self, text: str) -> None:
        self.output.write(text)
        self.output.flush()


def converse(chat: Chat, lines: TextIO) -> None:
    """Run turns until the input ends or /quit. Ctrl-C at the prompt ends it too."""
    interactive = lines.isatty()
    while True:
        if interactive:
            chat.output.write("> ")
            chat.output.flush()
        try:
            line = lines.readline()
        except KeyboardInterrupt:
            chat.output.write("\n")
            return
        if not line:
            return
        line = line.strip()
        if line.startswith("/"):
            if not chat.command(line):
                return
        elif line:
            chat.ask(line)


def first_model(client: httpx.Client) -> str:
    """Return the model to talk to if none was named. Raises ClusterError."""
    try:
        response = client.get("/v1/models")
        if response.is_error:
            raise refused(f"{client.base_url} answers {response.status_code}", response)
        models = [str(model["id"]) for model in response.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise ClusterError(f"{client.base_url} does not list its models: {error}") from error
    if not models:
        raise ClusterError(f"{client.base_url} serves no model at the moment")
    return models[0]


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            yield json.loads(data)
