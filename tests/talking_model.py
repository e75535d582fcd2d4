"""A model that calls tools and thinks aloud, for tests in which a script says what it answers.

Owns its chat template and its special tokens, after the manner of Qwen 3; the rest is the toy model's. Its
context holds what coding agents send with their first question. Its weights are the toy's, for which its
vocabulary is too large: only the simulated engine runs it.
"""

import json
from pathlib import Path

from replicas.toy_model import toy_model_path

CONTEXT_LENGTH = 131_072
MARKS = (
    *("<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
VOCAB_SIZE = 2048 + 64

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'These functions may be called:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\nA call is a JSON object with its name and arguments between these marks:\\n' }}
    {{- '<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages and messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set last.question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is string and loop.index0 > last.question %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}
                {{- call.function.arguments }}
            {%- else %}
                {{- call.function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def make_talking_model(directory: Path) -> Path:
    """A checkpoint in that folder, which is made."""
    directory.mkdir(parents=True)
    toy = toy_model_path()
    for name in ("model.safetensors", "generation_config.json"):
        (directory / name).symlink_to(toy / name)
    config = json.loads((toy / "config.json").read_text("utf-8"))
    config |= {"vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT_LENGTH}
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    tokenizer = json.loads((toy / "tokenizer.json").read_text("utf-8"))
    for token_id, mark in enumerate(MARKS, 2048):
        as_others = tokenizer["added_tokens"][0]
        tokenizer["added_tokens"].append(as_others | {"id": token_id, "content": mark, "special": False})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    words = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(words), "utf-8")
    return directory
