"""What every engine owes to answers that are held to a grammar: a suite that is run over each of them.

A test module for one engine subclasses `GrammarContract` and gives it a fixture `engine`, of the toy model.
"""

import json
import random
from functools import cache
from typing import Any

import jsonschema
import tokenizers

from replicas.protocol.frames import FinishReason, RefusalCode, RequestKey
from replicas.toy_model import toy_model_path
from router.answers.formats import AnswerFormat
from router.answers.grammars import grammar_for
from router.answers.wishes import FormatKind, OutputFormat, ToolChoice
from tests.examples import examples
from tests.json_schemas import random_schema
from tests.replicas.engine_run import EngineRun, prompt_of

CITY = 'start: "{\\"city\\": \\"" /[a-z ]{3,20}/ "\\"}"'


@cache
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(toy_model_path() / "tokenizer.json"))


def text(run: EngineRun, key: RequestKey) -> str:
    """Of an answer that ended where its grammar allows."""
    assert run.finish_reason(key) is FinishReason.STOP, run.deltas[key][-1]
    return str(tokenizer().decode(run.tokens(key), skip_special_tokens=True))


def grammar_of(schema: dict[str, Any]) -> str:
    return grammar_for(OutputFormat(FormatKind.JSON_SCHEMA, schema=schema), (), ToolChoice(), AnswerFormat())


class GrammarContract:
    num_schemas = examples(100)
    resumes_samples = True
    """Whether a resumed request that samples yields the tokens that it would have had."""

    def test_answers_follow_random_schemas(self, run: EngineRun) -> None:
        rng = random.Random(15)
        schemas: dict[RequestKey, dict[str, Any]] = {}
        for number in range(self.num_schemas):
            schema = random_schema(rng)
            jsonschema.Draft202012Validator.check_schema(schema)
            fields = {"temperature": 1.5, "seed": number, "max_tokens": 900, "ignore_eos": number % 2 == 0}
            schemas[run.add(prompt_of(run.engine, 8), grammar=grammar_of(schema), **fields)] = schema
            if len(schemas) % 8 == 0:
                run.finish()
        run.finish()
        for key, schema in schemas.items():
            jsonschema.validate(json.loads(text(run, key)), schema, format_checker=jsonschema.FormatChecker())

    def test_an_answer_ends_where_its_grammar_is_complete_and_nowhere_else(self, run: EngineRun) -> None:
        fields = {"temperature": 1.0, "max_tokens": 30, "grammar": 'start: "yes, " /ind{3,5}eed/'}
        for early in ({"ignore_eos": True}, {"ignore_eos": False}, {"min_tokens": 30}):
            key = run.generate(prompt_of(run.engine, 8), **fields, **early)
            assert text(run, key) in {f"yes, in{'d' * count}eed" for count in (3, 4, 5)}

    def test_the_end_is_put_off_while_the_grammar_has_more(self, run: EngineRun) -> None:
        eager_to_end = tuple((token, 20.0) for token in run.engine.card.eos_token_ids)
        fields = {"temperature": 1.0, "grammar": "start: /[a-z ]+/", "logit_bias": eager_to_end}
        keys = [
            run.add(
                prompt_of(run.engine, 8), max_tokens=300, min_tokens=12, seed=seed, ignore_eos=False, **fields
            )
            for seed in range(8)
        ]
        keys += [run.add(prompt_of(run.engine, 8), max_tokens=12, ignore_eos=True, **fields)]
        run.finish()
        assert all(len(run.tokens(key)) >= 12 for key in keys)
        assert run.finish_reason(keys[-1]) is FinishReason.LENGTH

    def test_a_resumed_answer_goes_on_where_it_was(self, run: EngineRun) -> None:
        prompt = prompt_of(run.engine, 20)
        temperature = 1.0 if self.resumes_samples else 0.0
        fields = {"temperature": temperature, "seed": 5, "max_tokens": 60, "grammar": CITY}
        whole = run.generate(prompt, **fields)
        tokens = run.tokens(whole)
        assert len(tokens) > 4
        keys = {
            number: run.add([*prompt, *tokens[:number]], num_output_tokens=number, **fields)
            for number in range(1, len(tokens))
        }
        run.finish()
        for number, key in keys.items():
            rest = tokens[:number] + run.tokens(key)
            assert run.finish_reason(key) is FinishReason.STOP
            assert tokenizer().decode(rest) == text(run, whole)

    def test_a_resumed_answer_follows_its_grammar(self, run: EngineRun) -> None:
        prompt = prompt_of(run.engine, 20)
        fields = {"temperature": 1.3, "seed": 5, "max_tokens": 60, "grammar": CITY}
        tokens = run.tokens(run.generate(prompt, **fields))
        for number in range(1, len(tokens)):
            key = run.generate([*prompt, *tokens[:number]], num_output_tokens=number, **fields)
            assert run.finish_reason(key) is FinishReason.STOP
            assert json.loads(tokenizer().decode(tokens[:number] + run.tokens(key)))["city"]

    def test_output_that_does_not_fit_the_grammar_is_not_resumed(self, run: EngineRun) -> None:
        key = run.generate(prompt_of(run.engine, 20), num_output_tokens=3, max_tokens=60, grammar=CITY)
        self._is_refused(run, key, "the output so far does not follow the grammar")

    def test_each_choice_stands_in_the_grammar_by_itself(self, run: EngineRun) -> None:
        fields = {"temperature": 1.2, "seed": 3, "max_tokens": 60, "grammar": CITY, "num_choices": 3}
        keys = run.add_choices(prompt_of(run.engine, 8), **fields)
        run.finish()
        texts = [text(run, key) for key in keys]
        assert len(set(texts)) == 3
        assert all(json.loads(each)["city"] for each in texts)

    def test_preempted_answers_follow_their_grammars(self, run: EngineRun) -> None:
        schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 40, "maxItems": 60}
        keys = [
            run.add(prompt_of(run.engine, 70, seed), seed=seed, max_tokens=900, grammar=grammar_of(schema))
            for seed in range(12)
        ]
        run.finish()
        assert sum(frame.num_preemptions for frame in run.frames)
        for key in keys:
            jsonschema.validate(json.loads(text(run, key)), schema)

    def test_a_grammar_that_is_none_ends_its_own_request_only(self, run: EngineRun) -> None:
        other = run.add(prompt_of(run.engine, 20), max_tokens=40)
        bad = [
            run.add(prompt_of(run.engine, 8), grammar=grammar)
            for grammar in (
                "start: nowhere",
                'start: %json {"type": "objekt"}',
                "(" * 5000,
                '{"grammars": 3}',
            )
        ]
        aborted = run.add(prompt_of(run.engine, 8), grammar=CITY)
        run.abort(aborted)
        run.finish()
        assert run.finish_reason(other) is FinishReason.LENGTH
        for key in bad:
            self._is_refused(run, key, "the grammar cannot be followed")
        assert text(run, run.generate(prompt_of(run.engine, 8), max_tokens=60, grammar=CITY))
        engine: Any = run.engine
        holder = engine._constraints if engine.card.engine == "simulated" else engine._grammars
        assert holder.num_held == 0

    def test_an_answer_that_takes_its_grammar_too_far_is_cut_off(self, run: EngineRun) -> None:
        grammar = "start: /(((a{1,100}){1,100}){1,100}){1,100}/"
        for _ in range(2):
            key = run.generate(prompt_of(run.engine, 8), max_tokens=300, min_tokens=300, grammar=grammar)
            assert run.finish_reason(key) is FinishReason.LENGTH, run.deltas[key][-1]
            assert 0 < len(run.tokens(key)) < 100
            assert set(tokenizer().decode(run.tokens(key))) == {"a"}
            assert sum(delta.usage is not None for delta in run.deltas[key]) == 1

    def _is_refused(self, run: EngineRun, key: RequestKey, message: str) -> None:
        (delta,) = run.deltas[key]
        assert delta.finish_reason is FinishReason.ERROR
        assert delta.refusal is not None
        assert delta.refusal.code is RefusalCode.INVALID_REQUEST
        assert message in delta.refusal.message
