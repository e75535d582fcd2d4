"""Bodies in the manner of two coding agents: what they send beside the conversation, and how they nest it."""

import json
from random import Random
from typing import Any

from tests.router.explain.conversations import text, tool

REASONING = "kvasir-reasoning-1:aGVsbG8gd29ybGQ="


def codex(rng: Random, num_turns: int) -> dict[str, Any]:
    """OpenAI's Responses: the instructions are a developer's message, some tools are in a namespace."""
    tools: list[dict[str, Any]] = [{"type": "function", **tool(rng, n), "strict": False} for n in range(6)]
    inner = [{"type": "function", **tool(rng, 10 + n), "strict": False} for n in range(3)]
    tools.append({"type": "namespace", "name": "agents", "description": text(rng, 20), "tools": inner})
    tools.append({"type": "web_search"})
    where = "<environment_context><cwd>/tmp/x</cwd></environment_context>"
    items: list[dict[str, Any]] = [
        _message("developer", "You are an agent. " + text(rng, 300), "<skills>" + text(rng, 50)),
        _message("user", where, text(rng, 10)),
    ]
    for number in range(num_turns):
        name, call_id = tools[number % 6]["name"], f"call_{number:024}"
        arguments = json.dumps({"command": ["bash", "-lc", text(rng, 8)], "workdir": "/tmp"})
        output = json.dumps({"output": text(rng, 100), "metadata": {"exit_code": 0}})
        items += [
            {"type": "reasoning", "id": f"rs_{number}", "summary": [], "encrypted_content": REASONING},
            {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments},
            {"type": "function_call_output", "call_id": call_id, "output": output},
            _message("assistant", text(rng, 20)),
            _message("user", text(rng, 20)),
        ]
    rest = {"tool_choice": "auto", "store": False, "prompt_cache_key": "k", "stream": True}
    return {"model": "tiny", "input": items, "tools": tools, **rest}


def _message(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    content = [{"type": kind, "text": one} for one in texts]
    return {"type": "message", "role": role, "id": f"msg_{role}", "content": content}


def claude_code(rng: Random, num_turns: int) -> dict[str, Any]:
    """Anthropic's Messages: a block of the system is for accounts, and one of its messages stands in the
    middle of the conversation."""
    tools = [_claude_tool(rng, number) for number in range(12)]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=sdk;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": text(rng, 300), "cache_control": {"type": "ephemeral"}},
    ]
    reminder = "<system-reminder>\n" + text(rng, 60) + "</system-reminder>"
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": reminder}, _text(rng, 10)]},
        {"role": "system", "content": "By the way: " + text(rng, 60)},
    ]
    for number in range(num_turns):
        call_id = f"toolu_{number:022}"
        arguments = {"file_path": text(rng, 2), "limit": number}
        call = {"type": "tool_use", "id": call_id, "name": tools[number]["name"], "input": arguments}
        thinking = {"type": "thinking", "thinking": text(rng, 20), "signature": "c2ln"}
        content: Any = [_text(rng, 90), _text(rng, 3)] if number % 2 else text(rng, 90)
        result = {"tool_use_id": call_id, "type": "tool_result", "content": content}
        messages += [
            {"role": "assistant", "content": [thinking, _text(rng, 10), call]},
            {"role": "user", "content": [result, _text(rng, 9)]},
        ]
    messages[-1]["content"][-1] = {**_text(rng, 9), "cache_control": {"type": "ephemeral"}}
    rest = {"max_tokens": 32000, "thinking": {"type": "adaptive"}, "metadata": {"user_id": "{}"}}
    return {"model": "tiny", "messages": messages, "system": system, "tools": tools, **rest}


def _text(rng: Random, most: int) -> dict[str, Any]:
    return {"type": "text", "text": text(rng, most)}


def _claude_tool(rng: Random, number: int) -> dict[str, Any]:
    made = tool(rng, number)
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **made["parameters"]}
    return {"name": made["name"], "description": made["description"], "input_schema": schema}
