"""What a script says is what the simulated engine answers: to which prompts, in which tokens, how far."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from replicas.config import ReplicaConfig
from replicas.engine import Engine, expand
from replicas.engines import build_engine_here
from replicas.process.settings import SettingsError
from replicas.protocol.blocks import pack_token_ids
from replicas.protocol.frames import FinishReason, RequestKey, SamplingParams, Submit, TokenDelta
from replicas.simulated_engine.script import MAX_BYTES, MAX_RULES, Rule, Script, ScriptError, read_rules
from replicas.toy_model import toy_model_path
from tests.replicas.builders import ROOT, engine_request, tokens_of
from tests.talking_model import make_talking_model

END = 2
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
RULES = {"weather": WEATHER, "21 degrees": "It is warm.", "in Paris": "Which city?", "nothing": ""}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talking_model(tmp_path_factory.mktemp("model") / "talking")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def script_file(folder: Path, rules: Mapping[str, str]) -> str:
    path = folder / "script.json"
    path.write_text(json.dumps([{"when": when, "say": say} for when, say in rules.items()]))
    return str(path)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    script = script_file(tmp_path_factory.mktemp("script"), RULES)
    return build_engine_here(
        ReplicaConfig(
            engine="simulated", model=str(model), simulated_hardware="instant", simulated_script=script
        )
    )[0]


def run(engine: Engine, prompt: Sequence[int], **fields: Any) -> list[TokenDelta]:
    engine.add(engine_request(prompt, **fields))
    deltas = []
    while engine.has_work():
        deltas += engine.step().deltas
    return deltas


def said(engine: Engine, prompt: Sequence[int], **fields: Any) -> list[int]:
    return tokens_of(run(engine, prompt, **{"max_tokens": 200, **fields}), 1)


def test_the_rule_whose_words_stand_last_is_what_it_answers_and_then_it_ends(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    def answer(text: str) -> str:
        tokens = said(engine, tokenizer.encode(text).ids)
        assert tokens[-1] == END
        return str(tokenizer.decode(tokens[:-1], skip_special_tokens=False))

    assert answer("<|im_start|>user\nWhat is the weather?<|im_end|>\n") == WEATHER
    assert answer("the weather<tool_response>\n21 degrees\n</tool_response>") == "It is warm."
    assert answer("21 degrees, such weather!") == WEATHER
    assert answer("weather in Paris") == "Which city?"
    assert answer("say nothing") == ""


def test_marks_of_the_model_are_said_as_the_tokens_that_they_are(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    tokens = said(engine, tokenizer.encode("weather").ids)
    marks = [tokenizer.token_to_id("<tool_call>"), tokenizer.token_to_id("</tool_call>")]
    assert [tokens[0], tokens[-2]] == marks


def test_prompts_without_any_of_its_words_are_answered_with_arbitrary_ones(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    tokens = said(engine, tokenizer.encode("Hello.").ids, max_tokens=30)
    assert len(tokens) == 30 and END not in tokens


def test_words_that_end_at_the_same_place_mean_the_longer_rule(tokenizer: Tokenizer) -> None:
    script = Script([Rule("Paris", "short"), Rule("in Paris", "long")], tokenizer, END, 3000)
    assert tokenizer.decode(script.answer(tokenizer.encode("in Paris").ids)) == "long"
    assert script.answer(tokenizer.encode("London").ids) is None


@given(num_output_tokens=st.integers(0, 40))
def test_a_resumed_answer_goes_on_where_it_was(
    engine: Engine, tokenizer: Tokenizer, num_output_tokens: int
) -> None:
    prompt = tokenizer.encode("the weather").ids
    whole = said(engine, prompt)
    output = whole[: min(num_output_tokens, len(whole) - 1)]
    assert said(engine, prompt + output, num_output_tokens=len(output)) == whole[len(output) :]


def test_what_an_answer_says_itself_is_no_prompt(engine: Engine, tokenizer: Tokenizer) -> None:
    """The tool call has the word `weather` in it, and `in Paris` is what another rule waits for."""
    prompt, output = tokenizer.encode("21 degrees").ids, tokenizer.encode("It is").ids
    rest = said(engine, prompt + output, num_output_tokens=len(output))
    assert tokenizer.decode(rest, skip_special_tokens=False) == " warm.<|im_end|>"


def test_limits_hold_as_for_any_answer(engine: Engine, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("weather").ids
    whole = said(engine, prompt)
    cut = run(engine, prompt, max_tokens=5)
    assert tokens_of(cut, 1) == whole[:5] and cut[-1].finish_reason is FinishReason.LENGTH
    assert len(said(engine, prompt, max_tokens=100, ignore_eos=True)) == 100
    long = said(engine, prompt, min_tokens=60)
    assert long[:-1][: len(whole) - 1] == whole[:-1] and len(long) == 60 and long[-1] == END


def test_all_choices_say_it_and_nothing_of_it_is_kept(engine: Engine, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("weather").ids
    submit = Submit(1, pack_token_ids(prompt), SamplingParams(max_tokens=100), ROOT, num_choices=3)
    for choice in expand(submit, serial=1):
        engine.add(choice)
    engine.abort(RequestKey(1, 1))
    deltas = []
    while engine.has_work():
        deltas += engine.step().deltas
    answers = {
        choice: [token for delta in deltas if delta.key.choice == choice for token in delta.token_ids]
        for choice in (0, 1, 2)
    }
    assert answers[1] == [] and answers[0] == answers[2] == said(engine, prompt)
    assert engine._answers == {}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"{", "it is no list"),
        (b'{"when": "a", "say": "b"}', "it is no list .* got `object`"),
        (b"[]", "it has 0 rules"),
        (b'[{"when": "a"}]', r"it is no list .* field `say` - at `\$\[0\]`"),
        (b'[{"when": "", "say": "b"}]', r"it is no list .* at `\$\[0\]\.when`"),
        (b'[{"when": "a", "say": 1}]', r"it is no list .* at `\$\[0\]\.say`"),
        (b'[{"when": "a", "say": "b", "then": "c"}]', "it is no list .* `then`"),
        (b'[{"when": "\xff", "say": "b"}]', "it is no list"),
        (b" " * (MAX_BYTES + 1), f"it is longer than {MAX_BYTES} bytes"),
        (b'[{"when": "a", "say": "b"}, {"when": "a", "say": "c"}]', "two rules have the same .when.: 'a'"),
        (json.dumps([{"when": "a", "say": "b"}] * (MAX_RULES + 1)).encode(), f"it has {MAX_RULES + 1} rules"),
    ],
)
def test_a_script_that_cannot_be_followed_is_refused_at_the_start_in_a_sentence(
    tmp_path: Path, text: bytes, complaint: str
) -> None:
    path = tmp_path / "script.json"
    path.write_bytes(text)
    config = ReplicaConfig(engine="simulated", simulated_script=str(path))
    with pytest.raises(
        SettingsError, match=rf"simulated_script: .*script\.json cannot be followed: {complaint}"
    ):
        build_engine_here(config)


def test_a_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    config = ReplicaConfig(engine="simulated", simulated_script=str(tmp_path))
    with pytest.raises(SettingsError, match=r"cannot be followed: .*Is a directory"):
        build_engine_here(config)


def test_words_that_the_model_has_no_token_for_are_refused() -> None:
    tokenizer = Tokenizer.from_file(str(toy_model_path() / "tokenizer.json"))
    with pytest.raises(ScriptError, match="the model has no token"):
        Script(read_rules(b'[{"when": "a", "say": "Paris"}]'), tokenizer, END, vocab_size=100)


def test_other_engines_have_no_script() -> None:
    with pytest.raises(SettingsError, match="for the engine simulated, not torch"):
        ReplicaConfig(simulated_script="script.json")
