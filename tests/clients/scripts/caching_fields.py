"""What the vendors' own libraries can say of caching, all at once, and prompts that are computed ahead."""

import anthropic
import openai
from scenes import MODEL, URL, act, scene

openai_client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
anthropic_client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)

OPTIONS = {"mode": "explicit", "ttl": "30m"}
MARK = {"mode": "explicit"}


def rules(api):
    return f"Kept for {api}. " + "Of all rules, this is one. " * 40


@scene
def chat():
    def ask(**more):
        part = {"type": "text", "text": rules("chats"), "prompt_cache_breakpoint": MARK}
        messages = [{"role": "system", "content": [part]}, {"role": "user", "content": "Say hello."}]
        usage = openai_client.chat.completions.create(
            model=MODEL,
            messages=messages,
            prompt_cache_key="key",
            prompt_cache_options=OPTIONS,
            safety_identifier="somebody",
            **more,
        ).usage
        return [usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens]

    return {
        "same": [ask(), ask(), ask(prompt_cache_retention="24h")],
        "salted": [ask(extra_body={"cache_salt": salt}) for salt in ("a", "b", "a")],
    }


@scene
def responses():
    def ask(**more):
        part = {"type": "input_text", "text": rules("responses"), "prompt_cache_breakpoint": MARK}
        return openai_client.responses.create(
            model=MODEL,
            input=[{"role": "developer", "content": [part]}, {"role": "user", "content": "Say hello."}],
            prompt_cache_key="key",
            **more,
        )

    ahead = ask(prompt_cache_options={**OPTIONS, "prewarm": True})
    answer = ask(prompt_cache_options=OPTIONS)
    return {
        "ahead": [ahead.output, ahead.usage.output_tokens],
        "text": answer.output_text,
        "usage": [answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens],
        "echoed": [answer.prompt_cache_key, answer.prompt_cache_options.model_dump(exclude_none=True)],
    }


@scene
def messages():
    def ask(max_tokens, **more):
        return anthropic_client.messages.create(
            model=MODEL,
            system=rules("messages"),
            messages=[{"role": "user", "content": "Say hello."}],
            max_tokens=max_tokens,
            **more,
        )

    ahead = ask(0, cache_control={"type": "ephemeral"})
    answer = ask(100, cache_control={"type": "ephemeral"})
    return {
        "ahead": [ahead.content, ahead.stop_reason, ahead.usage.model_dump()],
        "text": answer.content[0].text,
        "usage": answer.usage.model_dump(),
    }


act()
