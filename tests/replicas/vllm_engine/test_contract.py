"""vLLM keeps the contract of engines, and answers for itself where its ways are not ours."""

import pytest

from replicas.engine import RequestRefused
from replicas.protocol.frames import RefusalCode
from tests.replicas.engine_contract import EngineContract, EngineRun, prompt_of, run

__all__ = ["run"]

pytestmark = pytest.mark.vllm


class TestVllmEngine(EngineContract):
    resumes_samples = False


def test_presence_of_resumed_output_is_penalised(run: EngineRun) -> None:
    prompt = prompt_of(run.engine, 20)
    first = run.tokens(run.generate(prompt, max_tokens=1))[0]
    key = run.generate([*prompt, first], max_tokens=2, num_output_tokens=1, frequency_penalty=2.0)
    plain = run.generate(prompt, max_tokens=2, frequency_penalty=2.0)
    assert run.tokens(key) == run.tokens(plain)[1:]


def test_what_only_vllm_refuses_is_refused_as_invalid(run: EngineRun) -> None:
    with pytest.raises(RequestRefused) as caught:
        run.add(prompt_of(run.engine, 20), temperature=5.0)
    assert caught.value.code is RefusalCode.INVALID_REQUEST
    assert "temperature" in caught.value.message
    assert not run.engine.has_work()


def test_what_is_too_long_or_no_token_never_reaches_vllm(
    run: EngineRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = run.engine.card

    def unreachable(*arguments: object, **named: object) -> None:
        raise AssertionError("vLLM was asked")

    monkeypatch.setattr(run.engine, "_vllm", type("Vllm", (), {"add_request": unreachable})())
    too_long = [5] * card.context_length
    for token_ids, sentence in (
        (too_long, "context length"),
        ([5, card.vocab_size], "outside the vocabulary"),
    ):
        with pytest.raises(RequestRefused, match=sentence):
            run.add(token_ids)


def test_an_adapter_where_there_is_none_is_refused(run: EngineRun) -> None:
    with pytest.raises(RequestRefused, match="there is no adapter 'tuned'; this replica has none"):
        run.add(prompt_of(run.engine, 20), adapter="tuned")
