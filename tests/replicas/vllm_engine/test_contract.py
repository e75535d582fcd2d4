"""vLLM keeps the contracts of engines and of grammars, and answers for itself where its ways are not ours."""

from typing import Any

import pytest

from replicas.engine import RequestRefused
from replicas.protocol.frames import RefusalCode
from replicas.scheduling.step_promise import LEAST_TOKENS
from tests.replicas.engine_contract import EngineContract, EngineRun, prompt_of, run
from tests.replicas.grammar_contract import GrammarContract
from tests.replicas.vllm_engine.conftest import OneEngine
from tests.replicas.vllm_engine.foretold import write_model

__all__ = ["run"]

pytestmark = pytest.mark.vllm


@pytest.fixture
def engine(one_engine: OneEngine) -> Any:
    return one_engine.of()


class TestVllmEngine(EngineContract):
    resumes_samples = False


class TestVllmGrammars(GrammarContract):
    resumes_samples = False


def test_presence_of_resumed_output_is_penalised(run: EngineRun) -> None:
    prompt = prompt_of(run.engine, 20)
    first = run.tokens(run.generate(prompt, max_tokens=1))[0]
    key = run.generate([*prompt, first], max_tokens=2, num_output_tokens=1, frequency_penalty=2.0)
    plain = run.generate(prompt, max_tokens=2, frequency_penalty=2.0)
    assert run.tokens(key) == run.tokens(plain)[1:]


def test_a_sampled_answer_is_the_same_with_its_prompt_in_pieces_and_in_one_step(run: EngineRun) -> None:
    prompt = prompt_of(run.engine, 600)
    in_pieces = run.generate(prompt, max_tokens=8, temperature=1.0, seed=11)
    at_once = run.generate(prompt, max_tokens=8, temperature=1.0, seed=11)
    usages = [run.usage(key) for key in (in_pieces, at_once)]
    assert [usage.num_cached_tokens > 500 for usage in usages] == [False, True]
    assert len(run.tokens(in_pieces)) == 8
    assert run.tokens(in_pieces) == run.tokens(at_once)


def test_what_only_vllm_refuses_is_refused_as_invalid(run: EngineRun) -> None:
    with pytest.raises(RequestRefused, match="temperature") as caught:
        run.add(prompt_of(run.engine, 20), temperature=5.0)
    assert caught.value.code is RefusalCode.INVALID_REQUEST
    with pytest.raises(RequestRefused, match="there is no adapter 'tuned'; this replica has none"):
        run.add(prompt_of(run.engine, 20), adapter="tuned")
    assert not run.engine.has_work()


def test_what_is_too_long_or_no_token_never_reaches_vllm(
    run: EngineRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = run.engine.card

    def unreachable(*arguments: object, **named: object) -> None:
        raise AssertionError("vLLM was asked")

    monkeypatch.setattr(run.engine, "_vllm", type("Vllm", (), {"add_request": unreachable})())
    for token_ids, sentence in (
        ([5] * card.context_length, "context length"),
        ([5, card.vocab_size], "outside the vocabulary"),
    ):
        with pytest.raises(RequestRefused, match=sentence):
            run.add(token_ids)


def test_an_idle_engine_notices_that_a_process_of_vllms_has_died(engine: Any, one_engine: OneEngine) -> None:
    """In one process there is none; the executor of several says it so."""
    executor, woken = engine._core._engine_core.model_executor, []
    executor.register_failure_callback = woken.append
    engine.begin(lambda: None)
    assert len(woken) == 1 and not engine.has_work()
    executor.is_failed = True
    assert engine.has_work()
    with pytest.raises(RuntimeError, match="a process of vLLM's has died"):
        engine.step()
    one_engine.close()


class TestVllmEngineWithATier(EngineContract):
    resumes_samples = False

    @pytest.fixture(scope="class")
    def engine(self, one_engine: OneEngine) -> Any:
        return one_engine.of(host_kv_bytes=8 * 2**20)


class TestSparseVllmEngine(EngineContract):
    """A model whose layers keep different caches."""

    resumes_samples = False
    has_one_cache = False

    @pytest.fixture(scope="class")
    def engine(self, one_engine: OneEngine, tmp_path_factory: pytest.TempPathFactory) -> Any:
        model = write_model("gpt_oss", tmp_path_factory.mktemp("model") / "gpt-oss")
        options = {"prefix_cache_retention_interval": None}
        return one_engine.of(model=str(model), num_blocks=128, engine_args=options)


def test_a_promised_time_bounds_prompts_only_while_requests_decode(
    one_engine: OneEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicas.scheduling.step_promise.EXCESS_SHARE", 0.0)
    run = EngineRun(one_engine.of(slo_tpot=1e-5))
    prompt = prompt_of(run.engine, 600)
    alone = run.tokens(run.generate(prompt, max_tokens=8))
    assert [frame.num_prefill_tokens for frame in run.frames][:3] == [256, 256, 88]
    assert run.engine.reset_prefix_cache()
    run.frames.clear()
    decoding = run.add(prompt_of(run.engine, 20), max_tokens=30)
    run.step()
    late = run.add(prompt, max_tokens=8)
    run.finish()
    with_both = [frame.num_prefill_tokens for frame in run.frames if frame.num_decode_tokens]
    assert [num for num in with_both if num] == [LEAST_TOKENS] * 4 + [600 - 4 * LEAST_TOKENS]
    assert run.tokens(late) == alone and len(run.tokens(decoding)) == 30
