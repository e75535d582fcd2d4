"""TorchEngine as its loop sees it: sampling that can be resumed, limits, settings, and churn."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from replicas.config import ReplicaConfig
from replicas.process.settings import SettingsError
from replicas.protocol.frames import SamplingParams
from replicas.scheduling.step_promise import LEAST_TOKENS
from replicas.torch_engine.engine import TorchEngine
from tests.replicas.torch_engine.checkpoints import VOCAB_SIZE, Reference, make_checkpoint
from tests.replicas.torch_engine.driving import Driver, greedy


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("random-llama"), "llama")


@pytest.fixture
def driver(checkpoint: Path) -> Driver:
    return Driver(checkpoint)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


SAMPLED: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.2,
    "ignore_eos": True,
}


def test_a_seed_gives_the_same_tokens_alone_and_among_others(checkpoint: Path) -> None:
    sampling = SamplingParams(max_tokens=25, seed=11, **SAMPLED)
    alone = Driver(checkpoint)
    key = alone.add(prompt_of(30), sampling)
    expected = alone.finish()[key].token_ids

    crowded = Driver(checkpoint, max_batched_tokens=20)
    crowded.add(prompt_of(30), greedy(40))
    for seed in range(6):
        crowded.add(prompt_of(10 + seed), SamplingParams(max_tokens=20, seed=seed, **SAMPLED))
        crowded.step()
    key = crowded.add(prompt_of(30), sampling)
    assert crowded.finish()[key].token_ids == expected
    assert crowded.largest_batch > 5


@pytest.mark.parametrize("num_before", [1, 8, 24])
def test_a_generation_resumed_on_another_engine_goes_on_with_the_same_tokens(
    checkpoint: Path, driver: Driver, num_before: int
) -> None:
    sampling = SamplingParams(max_tokens=25, seed=5, **SAMPLED)
    key = driver.add(prompt_of(19), sampling)
    expected = driver.finish()[key].token_ids
    elsewhere = Driver(checkpoint, block_size=4, max_batched_tokens=16)
    key = elsewhere.add(prompt_of(19) + expected[:num_before], sampling, num_output_tokens=num_before)
    outcome = elsewhere.finish()[key]
    assert expected[:num_before] + outcome.token_ids == expected
    assert outcome.finish == "length"
    assert outcome.usage is not None
    assert outcome.usage.num_prompt_tokens == 19


def test_logprobs_equal_the_log_softmax_of_transformers(checkpoint: Path, driver: Driver) -> None:
    prompt = prompt_of(20)
    outcome = driver.generate(prompt, 10, num_logprobs=4, temperature=1.0, seed=3)
    logits = Reference(checkpoint).logits([*prompt, *outcome.token_ids[:-1]])[19:]
    expected = logits.log_softmax(dim=-1)
    assert len(outcome.logprobs) == 10
    for row, (token, logprobs) in enumerate(zip(outcome.token_ids, outcome.logprobs, strict=True)):
        assert logprobs.token_id == token
        assert logprobs.logprob == pytest.approx(float(expected[row, token]), abs=1e-4)
        assert [token_id for token_id, _ in logprobs.top] == expected[row].topk(4).indices.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_with_aborts_and_preemptions_yields_the_tokens_of_transformers(
    checkpoint: Path, seed: int
) -> None:
    rng = random.Random(seed)
    driver = Driver(
        checkpoint, block_size=4, num_blocks=24, context_length=90, max_batched_tokens=rng.choice([8, 24, 64])
    )
    heads = [prompt_of(rng.randrange(4, 40), index) for index in range(3)]
    running = {}
    for index in range(16):
        prompt = rng.choice(heads) + prompt_of(rng.randrange(1, 20), index)
        num_tokens = rng.randrange(1, 20)
        running[driver.add(prompt, greedy(num_tokens))] = prompt, num_tokens
        for _ in range(rng.randrange(4)):
            driver.step()
        if rng.random() < 0.2:
            aborted = rng.choice(list(running))
            driver.engine.abort(aborted)
            if driver.outcomes[aborted].finish is None:
                del running[aborted]
    outcomes = driver.finish()
    assert driver.num_restarts > 0
    reference = Reference(checkpoint)
    for key, (prompt, num_tokens) in running.items():
        token_ids = outcomes[key].token_ids
        assert len(token_ids) == num_tokens
        logits = reference.logits([*prompt, *token_ids[:-1]])
        assert logits[len(prompt) - 1 :].argmax(dim=-1).tolist() == token_ids
    assert driver.engine.step().load.num_used_blocks == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_the_reference(checkpoint: Path, dtype: str) -> None:
    driver = Driver(checkpoint, dtype=dtype)
    prompt = prompt_of(60)
    driver.generate(prompt[:50], 1)
    outcome = driver.generate(prompt, 6)
    expected = Reference(checkpoint).logits([*prompt, *outcome.token_ids[:-1]])[59:]
    similarity = torch.cosine_similarity(torch.stack(outcome.logits), expected)
    assert similarity.min() > (0.995 if dtype == "bfloat16" else 0.9999)


def test_an_overflow_in_float16_does_not_outlive_its_request(checkpoint: Path) -> None:
    """Blocks are reused without being cleared, and a NaN behind the mask would spread through it."""
    driver = Driver(checkpoint, dtype="float16", num_blocks=4, context_length=32)
    expected = driver.generate(prompt_of(11), 4).token_ids
    embeddings = driver.engine.runner._model._embeddings
    kept = embeddings.clone()
    embeddings[0] = torch.inf
    broken = driver.generate([0] * 31, 1)
    assert broken.logits[0].isnan().any()
    embeddings.copy_(kept)
    assert driver.engine.reset_prefix_cache()
    assert driver.generate(prompt_of(11), 4).token_ids == expected


def test_the_card_describes_the_engine(checkpoint: Path) -> None:
    config = ReplicaConfig(model=str(checkpoint), num_blocks=100, block_size=4, device="cpu", num_threads=1)
    engine = TorchEngine(config)
    card = engine.card
    assert card.name == checkpoint.name
    assert (card.engine, card.block_size, card.num_blocks) == ("torch", 4, 100)
    assert (card.context_length, card.vocab_size, card.eos_token_ids) == (400, VOCAB_SIZE, (5,))
    assert "tokenizer.json" in engine.bundle().files
    assert engine.step().load.num_total_blocks == 100
    assert not engine.has_work()
    engine.close()


def test_context_length_is_the_least_of_setting_model_and_cache(checkpoint: Path) -> None:
    def context_length(**settings: Any) -> int:
        config = ReplicaConfig(model=str(checkpoint), device="cpu", block_size=8, **settings)
        return TorchEngine(config).card.context_length

    assert context_length() == 512
    assert context_length(context_length=100) == 100
    assert context_length(context_length=100_000) == 512
    assert context_length(num_blocks=40) == 320
    block_bytes = 2 * 3 * 8 * 2 * 16 * 4
    assert context_length(kv_cache_bytes=50 * block_bytes + 1) == 400


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_blocks": 3}, "holds 24 tokens .3 blocks of 8., too few"),
        ({"kv_cache_bytes": 1000}, "holds 0 tokens"),
        ({"dtype": "int8"}, "setting dtype"),
        ({"device": "tpu"}, "setting device"),
        ({"device": "meta"}, "setting device"),
        ({"device": "cuda:99"}, "CUDA devices"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(
    checkpoint: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        TorchEngine(ReplicaConfig(**{"model": str(checkpoint), "block_size": 8, "device": "cpu", **settings}))


def test_a_promised_time_bounds_prompts_only_while_requests_decode(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicas.scheduling.step_promise.EXCESS_SHARE", 0.0)
    plain = Driver(checkpoint, max_batched_tokens=256)
    expected = plain.generate(prompt_of(350), 8).token_ids
    kept = Driver(checkpoint, max_batched_tokens=256, slo_tpot=1e-5)
    for seed in (3, 4, 5):  # what prompts cost is known then
        kept.generate(prompt_of(20, seed), 1)
    decoding = kept.add(prompt_of(20, 1), greedy(30))
    kept.step()
    late, frames = kept.add(prompt_of(350), greedy(8)), []
    while kept.engine.has_work():
        before = kept.num_computed_tokens
        kept.step()
        frames.append(kept.num_computed_tokens - before)
    assert frames[:3] == [LEAST_TOKENS + 1, LEAST_TOKENS + 1, 350 - 2 * LEAST_TOKENS + 1]
    assert kept.outcomes[late].token_ids == expected and len(kept.outcomes[decoding].token_ids) == 30
    assert kept.add(prompt_of(350, 2), greedy(1))
    before = kept.num_computed_tokens
    kept.step()
    assert kept.num_computed_tokens - before == 256
