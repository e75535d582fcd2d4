"""Three generated traces, one request after the other: where each goes, why, and what was in cache."""

import itertools
import json

import httpx

from loadtests.workloads.chat_bodies import ChatBodies
from loadtests.workloads.chats import BLOCK_TOKENS, agent, chat, cross_user
from tests.oracle.cluster import SMALL, TOY

NUM_REQUESTS = 150
SEED = 11
_TOLD = ("x-kvasir-replica", "x-kvasir-reason", "x-kvasir-cache")


def decisions(url: str) -> dict[str, str]:
    found = {}
    with httpx.Client(base_url=url, timeout=60) as client:
        for make, model in ((cross_user, TOY), (chat, TOY), (agent, SMALL)):
            bodies = ChatBodies(model, BLOCK_TOKENS, SEED)
            lines = []
            for request in itertools.islice(make(seed=SEED).requests, NUM_REQUESTS):
                body = {**json.loads(bodies.body(request)), "stream": False, "seed": SEED}
                del body["stream_options"]
                answer = client.post("/v1/chat/completions", json=body)
                told = [answer.headers.get(name, "") for name in _TOLD]
                lines.append(" ".join((*told, json.dumps(answer.json().get("usage", answer.text)))))
            found[make.__name__] = "\n".join(lines)
    return found
