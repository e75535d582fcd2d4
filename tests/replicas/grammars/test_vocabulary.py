"""Marks that are tokens of a model: grammars name them, and the tokenizer's own encoding of a call fits."""

import json

import pytest
import tokenizers

from replicas.grammars.matcher import Matcher, compile_grammar
from replicas.grammars.vocabulary import read_vocabulary
from replicas.protocol.frames import SamplingParams
from replicas.protocol.status import TokenizerBundle
from replicas.toy_model import toy_model_path
from router.answers.formats import AnswerFormat, ReasoningMarks, ToolSyntax
from router.answers.grammars import grammar_for
from router.answers.wishes import ToolChoice, ToolMode

EOS = (0, 2)
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HERMES = (
    '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
)
XML = (
    "<think>\nHm.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nRom\n</parameter>\n</function>\n"
    "</tool_call>"
)


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize(("syntax", "text"), [(ToolSyntax.HERMES, HERMES), (ToolSyntax.QWEN_XML, XML)])
@pytest.mark.parametrize("mode", [ToolMode.REQUIRED, ToolMode.AUTO])
def test_a_call_whose_marks_are_tokens_is_followed(
    syntax: ToolSyntax, text: str, mode: ToolMode, is_special: bool
) -> None:
    source = tokenizers.Tokenizer.from_file(str(toy_model_path() / "tokenizer.json"))
    source.add_tokens([tokenizers.AddedToken(mark, special=is_special, normalized=False) for mark in MARKS])
    bundle = TokenizerBundle({"tokenizer.json": source.to_str().encode()})
    vocabulary = read_vocabulary(bundle, 2048, EOS)
    grammar = grammar_for(
        None,
        [TOOL],
        ToolChoice(mode),
        AnswerFormat(syntax, ReasoningMarks()),
        special_tokens=MARKS,
    )
    inner = compile_grammar(vocabulary, grammar)
    token_ids: list[int] = source.encode(text, add_special_tokens=False).ids
    assert source.token_to_id("<tool_call>") in token_ids
    assert inner.deep_copy().try_consume_tokens(token_ids) == len(token_ids)
    resumed = Matcher(inner, _sampling(grammar), EOS, token_ids)
    assert resumed.inner.is_accepting()


def _sampling(grammar: str) -> SamplingParams:
    assert json.loads(grammar)["grammars"]
    return SamplingParams(max_tokens=200, grammar=grammar)
