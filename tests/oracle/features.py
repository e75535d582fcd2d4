"""Everything beside generating: routes, heads, counts, caches, stored responses, tenants, explanations.

Owns what is asked of the two routers, in which order. Ids that an answer names are used in the next request.
"""

import gzip
import json
from collections.abc import Callable, Iterator, Mapping

from tests.oracle.asked import DIALECTS, LONG, Body, Dialect
from tests.oracle.cluster import KEYS, TALKING, TOY, key_of
from tests.oracle.exchanges import Talk, only_shape, only_totals

CHAT, COMPLETIONS, MESSAGES, RESPONSES, GEMINI = DIALECTS
NO_ID = "0" * 24
PATHS = f"""\
/ /docs /openapi.json /health /ready /version /metrics /load /tokenize /detokenize /ping /invocations
/v1/models /v1/models/{TALKING} /v1/models/nobody /v1beta/models /v1beta/models/{TALKING}
/v1beta/models/nobody /v1/chat/completions /v1/completions /v1/messages /v1/messages/count_tokens
/v1/messages/batches /v1/responses /v1/responses/compact /v1/responses/input_tokens
/v1/responses/resp_{NO_ID} /v1/responses/resp_{NO_ID}/input_items /v1/responses/resp_{NO_ID}/cancel
/v1/chat/completions/batch /v1/chat/completions/render /v1/embeddings /v1/rerank /v1/score
/v1/audio/speech /v1/images/generations /v1/moderations /v1/files /v1/batches /v1/fine_tuning/jobs
/v1beta/models/{TALKING}:generateContent /v1beta/models/{TALKING}:streamGenerateContent
/v1beta/models/{TALKING}:countTokens /v1beta/models/{TALKING}:embedContent
/v1/models/{TALKING}:generateContent /v1/models/{TALKING}:countTokens /v1/cachedContents
/v1beta/cachedContents /v1beta/cachedContents/cache_{NO_ID} /v1/caches /v1/caches/cache_{NO_ID}
/v1/cache/explain/req_{NO_ID} /v1/usage /v1/published /v1/published/pub_{NO_ID}
/explain/v1/chat/completions /explain/v1/completions /explain/v1/messages /explain/v1/responses
/explain/tenants/default/req_{NO_ID} /live/state /live/prefixes /live/decisions /live/decisions/1
/page/nothing.js
/nothing /v1/ /v1
"""
COUNTS = (
    "/tokenize",
    "/tokenize",
    "/v1/messages/count_tokens",
    "/v1/responses/input_tokens",
    f"/v1beta/models/{TALKING}:countTokens",
)
PAGES = (
    "limit=1",
    f"limit=1&after_id={TALKING}",
    f"limit=1&before_id={TOY}",
    "limit=0",
    "limit=x",
    "limit=1001",
    "after_id=nobody",
)
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
OF_THE_MOMENT = ("/", "/docs", "/load", "/metrics", "/live/state", "/live/prefixes", "/live/decisions")


def routes(talk: Talk) -> None:
    for path in PATHS.split():
        for method in METHODS:
            is_of_moment = path.startswith(OF_THE_MOMENT[1:]) or path == "/"
            talk.ask(
                f"{method} {path}",
                path,
                method=method,
                written=only_shape if is_of_moment and method in ("GET", "HEAD") else None,
            )


def heads(talk: Talk) -> None:
    for dialect in DIALECTS:
        good = json.dumps(dialect.body("Say hello.")).encode()
        bodies = {
            "empty": b"",
            "no json": b"{",
            "list": b"[]",
            "text": b'"x"',
            "null": b"null",
            "bytes": b'{"model": "\xff"}',
            "deep": b'{"a":' * 2000 + b"1" + b"}" * 2000,
            "twice": good[:-1] + b', "model": "nobody"}',
            "more behind": good + b"}",
            "nan": good[:-1] + b', "temperature": NaN}',
            "large": good[:-1] + b', "metadata": "' + b"x" * (8 * 2**20) + b'"}',
        }
        for label, body in bodies.items():
            talk.ask(f"{dialect.name}/body/{label}", dialect.path, body, method="POST")
        for label, headers, body in (
            ("form", {"content-type": "application/x-www-form-urlencoded"}, good),
            ("other json", {"content-type": "application/vnd.api+json; charset=utf-8"}, good),
            ("gzip", {"content-encoding": "gzip"}, gzip.compress(good, mtime=0)),
            ("no gzip", {"content-encoding": "gzip"}, good),
            ("brotli", {"content-encoding": "br"}, good),
            ("foreign host", {"host": "evil.example.org"}, good),
            ("foreign page", {"origin": "https://evil.example.org"}, good),
            ("allowed page", {"origin": "https://chat.example.org"}, good),
            ("own id", {"x-request-id": "my-own.id:1"}, good),
            ("bad id", {"x-request-id": "no spaces"}, good),
            ("trace", {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}, good),
            ("timeout", {"x-kvasir-timeout": "30"}, good),
            ("bad timeout", {"x-kvasir-timeout": "soon"}, good),
            ("no time", {"x-kvasir-timeout": "0.000001"}, good),
            ("group", {"x-kvasir-cache-group": "pool"}, good),
            ("key", {"authorization": "Bearer sk-nobody"}, good),
            ("upgrade", {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c"}, good),
        ):
            talk.ask(f"{dialect.name}/head/{label}", dialect.path, body, headers=headers)
        preflight = {"origin": "https://chat.example.org", "access-control-request-method": "POST"}
        talk.ask(f"{dialect.name}/preflight", dialect.path, method="OPTIONS", headers=preflight)


def counts(talk: Talk) -> None:
    """Of the same conversations as answers are asked for."""
    for dialect, path in zip(DIALECTS, COUNTS, strict=True):
        options = {f"option {label}": dialect.body("Hi", **more) for label, more in dialect.options.items()}
        bodies = {**dialect.conversations, **dialect.wrong, **options, "long": dialect.body(LONG)}
        for label, body in bodies.items():
            talk.ask(f"{dialect.name}/{label}", path, body)
    tokens = {
        "words": [100, 101, 102, 300],
        "special": [1, 2, 2048],
        "none": [],
        "too large": [10**6],
        "text": "x",
    }
    for label, ids in tokens.items():
        talk.ask(f"detokenize/{label}", "/detokenize", {"model": TALKING, "tokens": ids})
    talk.ask("strings", "/tokenize", {"model": TALKING, "prompt": "Say hello.", "return_token_strs": True})
    for label, headers in {"anthropic": {"anthropic-version": "2023-06-01"}, "openai": {}}.items():
        for path in ("/v1/models", f"/v1/models/{TALKING}", "/v1/models/nobody"):
            talk.ask(f"models/{label}{path}", path, headers=headers)
        for query in PAGES:
            talk.ask(f"models/{label}/v1/models?{query}", f"/v1/models?{query}", headers=headers)
    for query in ("", "?pageSize=1", "?pageToken=x", "?pageSize=no"):
        talk.ask(f"models/gemini{query}", f"/v1beta/models{query}")


def caches(talk: Talk) -> None:
    beginning = [{"role": "system", "content": LONG}]
    chat = talk.ask("chat", "/v1/caches", {"model": TALKING, "messages": beginning, "name": "handbook"})
    text = talk.ask("text", "/v1/caches", {"model": TALKING, "prompt": LONG, "ttl": 7200})
    salted = talk.ask(
        "salted", "/v1/caches", {"model": TALKING, "messages": beginning, "ttl": 60, "cache_salt": "s"}
    )
    tools = CHAT.options["tools"]["tools"]
    with_tools = talk.ask("tools", "/v1/caches", {"model": TALKING, "messages": beginning, "tools": tools})
    for label, body in {
        "no model": {"messages": beginning},
        "other model": {"model": "nobody", "messages": beginning},
        "both": {"model": TALKING, "messages": beginning, "prompt": "x"},
        "neither": {"model": TALKING},
        "ttl": {"model": TALKING, "prompt": "x", "ttl": 0},
        "long ttl": {"model": TALKING, "prompt": "x", "ttl": 100_000},
        "name": {"model": TALKING, "prompt": "x", "name": "n" * 200},
        "large": {"model": TALKING, "prompt": "x" * 1_100_000},
        "unknown": {"model": TALKING, "prompt": "x", "something": 1},
    }.items():
        talk.ask(f"wrong/{label}", "/v1/caches", body)
    for label, cache, more in (
        ("chat", chat, {}),
        ("chat again", chat, {}),
        ("with tools", with_tools, {}),
        ("tools of its own", chat, {"tools": tools}),
        ("of the other kind", text, {}),
        ("without its salt", salted, {}),
        ("salt", salted, {"cache_salt": "s"}),
        ("other model", chat, {"model": TOY}),
        ("streamed", chat, {"stream": True, "stream_options": {"include_usage": True}}),
    ):
        talk.ask(f"use/{label}", CHAT.path, CHAT.body("Say hello.", cache=cache["id"], **more))
    talk.ask("use/text", COMPLETIONS.path, COMPLETIONS.body("Count to nine.", cache=text["id"]))
    talk.ask("use/nothing more", CHAT.path, {**CHAT.body("", cache=chat["id"]), "messages": []})
    for query in ("", "?limit=1", f"?limit=2&after={text['id']}", "?limit=0", "?after=nothing"):
        talk.ask(f"list{query.replace(text['id'], 'ID')}", f"/v1/caches{query}")
    one = f"/v1/caches/{chat['id']}"
    talk.ask("one", one)
    for label, body in {
        "ttl": {"ttl": 1200},
        "name": {"name": "b"},
        "wrong": {"ttl": "x"},
        "none": {},
    }.items():
        talk.ask(f"change/{label}", one, body, method="PATCH")
    talk.ask("delete", one, method="DELETE")
    talk.ask("delete again", one, method="DELETE")
    talk.ask("gone", one)
    talk.ask("use/gone", CHAT.path, CHAT.body("Say hello.", cache=chat["id"]))
    of_gemini = {
        "model": f"models/{TALKING}",
        "contents": [{"role": "user", "parts": [{"text": LONG}]}],
        "ttl": "600s",
        "displayName": "handbook",
    }
    made = talk.ask("gemini", "/v1beta/cachedContents", of_gemini)
    path = f"/v1beta/{made['name']}"
    for label, more in {"plain": {}, "system": GEMINI.options["system"]}.items():
        body = GEMINI.body("Say hello.", cachedContent=made["name"], **more)
        talk.ask(f"gemini/use/{label}", GEMINI.path, body)
        talk.ask(f"gemini/use/{label}/stream", str(GEMINI.stream_path), body)
    talk.ask("gemini/one", path)
    talk.ask("gemini/list", "/v1beta/cachedContents?pageSize=5")
    talk.ask("gemini/change", path, {"ttl": "1200s"}, method="PATCH")
    talk.ask("gemini/change wrong", path, {"displayName": "x"}, method="PATCH")
    talk.ask("gemini/among others", "/v1/caches")
    talk.ask("gemini/delete", path, method="DELETE")
    talk.ask("gemini/gone", path)


def stored(talk: Talk) -> None:
    first = talk.ask("first", RESPONSES.path, RESPONSES.body("Say hello.", instructions="Be kind."))
    before = first["id"]
    for number, question in enumerate(("Count to nine.", "What is the sky like?", "Be loud."), 2):
        for way in ({}, {"stream": True}):
            body = RESPONSES.body(question, previous_response_id=before, **way)
            told = talk.ask(f"{number}/{'stream' if way else 'whole'}", RESPONSES.path, body)
        before = (told.get("response") or told)["id"]
    called = talk.ask(
        "call", RESPONSES.path, RESPONSES.body("What is the weather in Paris?", **RESPONSES.options["tools"])
    )
    [call] = [item for item in called["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5 degrees"}
    more = {"previous_response_id": called["id"], **RESPONSES.options["tools"]}
    talk.ask("result", RESPONSES.path, RESPONSES.body([result], **more))
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    talk.ask(
        "reference", RESPONSES.path, RESPONSES.body([reference, {"role": "user", "content": "21 degrees"}])
    )
    compared = {"prompt_cache_options": {"comparison_response_id": first["id"]}}
    talk.ask("compared", RESPONSES.path, RESPONSES.body("Say hello.", instructions="Be cruel.", **compared))
    path = f"/v1/responses/{before}"
    for query in ("", "?include[]=message.output_text.logprobs", "?stream=true"):
        talk.ask(f"one{query}", path + query)
    for query in ("", "?limit=1", "?order=asc", "?limit=0", "?after=nothing"):
        talk.ask(f"items{query}", f"{path}/input_items{query}")
    talk.ask("cancel", f"{path}/cancel", {})
    talk.ask("delete", path, method="DELETE")
    talk.ask("gone", path)
    talk.ask("from what is gone", RESPONSES.path, RESPONSES.body("Hi", previous_response_id=before))


def conversations(talk: Talk) -> None:
    """Turn by turn, with what was answered, so that prompts go on from their own tokens."""
    questions = ("Say hello.", "What is the sky like?", "the weather in Paris and Rome?", "Count to nine.")
    for streamed in (False, True):
        messages: list[Body] = [{"role": "system", "content": LONG}]
        for number, question in enumerate(questions):
            messages.append({"role": "user", "content": question})
            body = {**CHAT.body("", **CHAT.options["tools"]), "messages": messages}
            told = talk.ask(f"chat/{streamed}/{number}", CHAT.path, body)
            answer = told["choices"][0]["message"]
            messages.append(
                {key: answer[key] for key in ("role", "content", "tool_calls") if answer.get(key)}
            )
            called = [made["id"] for made in answer.get("tool_calls") or ()]
            messages += [{"role": "tool", "tool_call_id": each, "content": "5 degrees"} for each in called]
            if streamed:  # a turn that is asked again
                talk.ask(f"chat/{streamed}/{number}/again", CHAT.path, {**body, "stream": True})
        longer = LONG.replace("night", "dawn") if streamed else LONG
        turns: list[Body] = []
        for number, question in enumerate(questions[:2]):
            turns.append({"role": "user", "content": f"{longer} {question}"})
            body = {**MESSAGES.body(""), "messages": turns}
            told = talk.ask(f"messages/{streamed}/{number}", MESSAGES.path, body)
            turns.append({"role": "assistant", "content": told["content"]})


def explained(talk: Talk) -> None:
    question = {"messages": [{"role": "user", "content": LONG + "Say hello."}]}
    for path, dialect in {"chat/completions": CHAT, "completions": COMPLETIONS}.items():
        for label, body in {**dialect.conversations, "long": dialect.body(LONG)}.items():
            talk.ask(f"preview/{path}/{label}", f"/explain/v1/{path}", body)
    for number, changed in enumerate((LONG, LONG, LONG.replace("door", "gate", 1), f"{LONG} And more.")):
        messages = [{"role": "user", "content": changed}]
        body = {**CHAT.body(""), **question, "messages": messages}
        told = talk.ask(f"story/{number}", CHAT.path, body)
        talk.ask(f"story/{number}/told", f"/v1/cache/explain/{told['id']}")
        talk.ask(f"story/{number}/operator", f"/explain/tenants/default/{told['id']}")


def tenant(talk: Talk) -> None:
    """What is asked with one key."""
    for label, dialect in {"chat": CHAT, "messages": MESSAGES, "gemini": GEMINI}.items():
        for number in range(4):
            body = dialect.body(LONG + "Say hello.") if number % 2 else dialect.body("Say hello.")
            talk.ask(f"{label}/{number}", dialect.path, body)
    talk.ask("stream", CHAT.path, CHAT.body("Count to nine.", stream=True))
    talk.ask("two choices", CHAT.path, CHAT.body("Hi", n=3))
    talk.ask("priority", CHAT.path, CHAT.body("Hi", priority=-5))
    for group in ("pool", "other", "none", "nobody"):
        headers = {"x-kvasir-cache-group": group}
        talk.ask(f"group/{group}", CHAT.path, CHAT.body(LONG), headers=headers)
    for path in ("/v1/models", "/v1/caches", "/v1/published", "/metrics", "/live/state", "/ready", "/health"):
        talk.ask(path, path, written=only_shape if path in OF_THE_MOMENT else None)
    talk.ask("cache", "/v1/caches", {"model": TALKING, "prompt": LONG})
    talk.ask("store", RESPONSES.path, RESPONSES.body("Say hello."))
    talk.ask("story", f"/v1/cache/explain/req_{NO_ID}")
    talk.ask("preview", "/explain/v1/chat/completions", CHAT.body("Hi"), written=only_shape)
    talk.ask(
        "publish", "/v1/published", {"model": TALKING, "messages": [{"role": "system", "content": LONG}]}
    )
    talk.ask("after it", CHAT.path, CHAT.body(LONG))
    talk.ask("allowed page", CHAT.path, CHAT.body(LONG), headers={"origin": "https://chat.example.org"})
    for query in ("", "?group_by=key", "?group_by=model&bucket=day", "?start=x", "?tenant=bell"):
        talk.ask(f"usage{query}", f"/v1/usage{query}")


def refused(talk: Talk) -> None:
    """Keys that are none."""
    for label, headers in {
        "no key": {},
        "other key": {"authorization": "Bearer sk-other"},
        "unknown": {"authorization": f"Bearer {key_of('unknown')}"},
        "wrong secret": {"authorization": f"Bearer {key_of('bell')[:-1]}A"},
        "expired": {"authorization": f"Bearer {key_of('late')}"},
        "basic": {"authorization": "Basic eDp5"},
        "anthropic": {"x-api-key": "x"},
        "gemini": {"x-goog-api-key": "x"},
        "two": {"authorization": f"Bearer {key_of('bell')}", "x-api-key": key_of("cole")},
    }.items():
        for dialect in DIALECTS:
            talk.ask(f"{label}/{dialect.name}", dialect.path, dialect.body("Hi"), headers=headers)
        for path in (
            "/v1/models",
            "/v1beta/models",
            "/metrics",
            "/health",
            "/",
            "/v1/usage",
            "/openapi.json",
        ):
            talk.ask(
                f"{label}{path}",
                path,
                headers=headers,
                written=only_shape if path in ("/metrics", "/openapi.json") else None,
            )


def dialect_group(dialect: Dialect) -> Callable[[Talk], None]:
    def ask(talk: Talk) -> None:
        for label, path, body in dialect.asked():
            talk.ask(label, path, body)

    return ask


OPEN: Mapping[str, Callable[[Talk], None]] = {
    **{dialect.name: dialect_group(dialect) for dialect in DIALECTS},
    **{each.__name__: each for each in (routes, heads, counts, caches, stored, conversations, explained)},
}


def metrics(talk: Talk) -> None:
    talk.ask("series", "/metrics", written=only_shape)
    talk.ask("totals", "/metrics", written=only_totals)


def groups() -> Iterator[tuple[str, str, Mapping[str, str], Callable[[Talk], None]]]:
    """Name, who is asked, with which headers, and what."""
    for name, ask in OPEN.items():
        yield name, "open", {}, ask
    yield "refused", "keyed", {}, refused
    for name in KEYS:
        yield f"tenant-{name}", "keyed", {"authorization": f"Bearer {key_of(name)}"}, tenant
    for who in ("open", "keyed", "replica"):
        yield f"metrics-{who}", who, {"authorization": f"Bearer {key_of('admin')}"}, metrics
