"""The engine's tokens and logits equal transformers', however the work is cut, cached or interleaved."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.replicas.torch_engine.checkpoints import VOCAB_SIZE, Reference, make_checkpoint
from tests.replicas.torch_engine.driving import Driver, Outcome, greedy

FAMILIES = ("llama", "qwen2", "qwen3")
BLOCK_SIZE = 8


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture
def driver(checkpoint: Path) -> Iterator[Driver]:
    driver = Driver(checkpoint, block_size=BLOCK_SIZE)
    yield driver
    driver.engine.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def check(outcome: Outcome, prompt: Sequence[int], num_tokens: int, reference: Reference) -> None:
    expected = reference.generate(prompt, num_tokens)
    assert outcome.token_ids == expected
    logits = reference.logits([*prompt, *expected[:-1]])[len(prompt) - 1 :]
    torch.testing.assert_close(torch.stack(outcome.logits), logits, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 61])
def test_a_cold_prompt_yields_the_tokens_and_logits_of_transformers(
    driver: Driver, reference: Reference, length: int
) -> None:
    prompt = prompt_of(length)
    outcome = driver.generate(prompt, 20)
    check(outcome, prompt, 20, reference)
    assert outcome.usage is not None
    assert outcome.usage.num_cached_tokens == 0
    assert driver.num_computed_tokens == length + 19


@pytest.mark.parametrize("length", [15, 16, 17, 60])
def test_a_warm_prompt_is_not_computed_again_and_yields_the_same(
    driver: Driver, reference: Reference, length: int
) -> None:
    prompt = prompt_of(length)
    driver.generate(prompt, 4)
    driver.num_computed_tokens = 0
    outcome = driver.generate(prompt, 12)
    check(outcome, prompt, 12, reference)
    num_cached = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert outcome.usage is not None
    assert outcome.usage.num_cached_tokens == num_cached
    assert driver.num_computed_tokens == length - num_cached + 11


@pytest.mark.parametrize("num_shared", [23, 24, 25])
@pytest.mark.parametrize("num_own", [1, 8, 30])
def test_a_prefix_shared_to_a_block_boundary_or_one_token_around_it_changes_no_result(
    driver: Driver, reference: Reference, num_shared: int, num_own: int
) -> None:
    shared = prompt_of(num_shared)
    driver.generate(shared + prompt_of(40, seed=1), 2)
    prompt = shared + prompt_of(num_own, seed=2)
    outcome = driver.generate(prompt, 10)
    check(outcome, prompt, 10, reference)
    assert outcome.usage is not None
    assert outcome.usage.num_cached_tokens == num_shared // BLOCK_SIZE * BLOCK_SIZE


def test_an_answer_is_a_prefix_of_the_next_turn(driver: Driver, reference: Reference) -> None:
    prompt = prompt_of(30)
    answer = driver.generate(prompt, 21).token_ids
    following = prompt + answer + prompt_of(9, seed=1)
    outcome = driver.generate(following, 10)
    check(outcome, following, 10, reference)
    assert outcome.usage is not None
    assert outcome.usage.num_cached_tokens == 48, "50 tokens have KV, six blocks of them full"


@pytest.mark.parametrize("budget", [7, 16, 33, 64])
def test_prefill_in_chunks_of_any_size_yields_the_same(
    checkpoint: Path, reference: Reference, budget: int
) -> None:
    driver = Driver(checkpoint, block_size=BLOCK_SIZE, max_batched_tokens=budget)
    prompts = [prompt_of(100), prompt_of(100)[:50] + prompt_of(20, seed=1), prompt_of(3)]
    keys = [driver.add(prompt, greedy(9)) for prompt in prompts]
    outcomes = driver.finish()
    for key, prompt in zip(keys, prompts, strict=True):
        check(outcomes[key], prompt, 9, reference)


def test_a_chunk_longer_than_a_piece_of_queries_behind_a_prefix_yields_the_same(
    checkpoint: Path, reference: Reference
) -> None:
    driver = Driver(checkpoint, block_size=BLOCK_SIZE)
    prompt = prompt_of(380)
    driver.generate(prompt[:20], 2)
    check(driver.generate(prompt, 4), prompt, 4, reference)


def test_preempted_requests_resume_with_the_same_tokens(checkpoint: Path, reference: Reference) -> None:
    driver = Driver(checkpoint, block_size=4, num_blocks=20, context_length=80)
    prompts = [prompt_of(20, seed) for seed in range(4)]
    keys = [driver.add(prompt, greedy(30)) for prompt in prompts]
    outcomes = driver.finish()
    assert driver.num_restarts > 0, "20 blocks are too few for four requests of 50 tokens"
    for key, prompt in zip(keys, prompts, strict=True):
        check(outcomes[key], prompt, 30, reference)


def test_sixteen_interleaved_requests_with_and_without_shared_prefixes_yield_the_same(
    checkpoint: Path, reference: Reference
) -> None:
    driver = Driver(checkpoint, block_size=BLOCK_SIZE, max_batched_tokens=48)
    shared = [prompt_of(40, seed=100), prompt_of(90, seed=101)]
    prompts = [
        (shared[index % 2] if index % 4 else []) + prompt_of(1 + 5 * (index % 7), seed=index)
        for index in range(16)
    ]
    lengths = [3 + index % 11 for index in range(16)]
    keys = []
    for prompt, length in zip(prompts, lengths, strict=True):
        keys.append(driver.add(prompt, greedy(length)))
        if len(keys) % 3 == 0:
            driver.step()
    outcomes = driver.finish()
    assert driver.largest_batch > 4
    for key, prompt, length in zip(keys, prompts, lengths, strict=True):
        check(outcomes[key], prompt, length, reference)


def test_equal_prompts_of_one_step_share_blocks_that_are_computed_in_that_step(
    checkpoint: Path, reference: Reference
) -> None:
    driver = Driver(checkpoint, block_size=BLOCK_SIZE)
    prompt = prompt_of(50)
    keys = [driver.add(prompt, greedy(6)) for _ in range(3)]
    driver.step()
    assert driver.num_computed_tokens == 50 + 2 + 2
    outcomes = driver.finish()
    for key in keys:
        check(outcomes[key], prompt, 6, reference)


def test_decoding_rows_of_very_different_length_yield_the_same(
    checkpoint: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicas.torch_engine.gathered_attention._MAX_GATHERED_TOKENS", 64)
    driver = Driver(checkpoint, block_size=BLOCK_SIZE)
    prompts = [prompt_of(length) for length in (1, 300, 30, 31, 9, 140, 3, 22)]
    keys = [driver.add(prompt, greedy(5)) for prompt in prompts]
    outcomes = driver.finish()
    for key, prompt in zip(keys, prompts, strict=True):
        check(outcomes[key], prompt, 5, reference)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied head": ("llama", {"tie_word_embeddings": True}),
    "tied head of qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "rope linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "rope dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "rope llama3": ("llama", {"rope_parameters": LLAMA3}),
    "rope yarn": ("qwen2", {"rope_parameters": YARN}),
    "rope yarn with all its dials": (
        "qwen3",
        {
            "rope_parameters": YARN
            | {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False}
        },
    ),
    "rope yarn with its attention factor": ("llama", {"rope_parameters": YARN | {"attention_factor": 1.3}}),
    "another theta": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "biases of qwen3": ("qwen3", {"attention_bias": True}),
    "one key head for each query head": ("llama", {"num_key_value_heads": 6}),
    "one key head for all": ("qwen2", {"num_key_value_heads": 1}),
    "head_dim apart from hidden_size": ("qwen3", {"head_dim": 32}),
    "another epsilon": ("llama", {"rms_norm_eps": 0.1}),
    "shards": ("llama", {"shard": "40KB"}),
    "weights in bfloat16": ("qwen3", {"dtype": torch.bfloat16}),
    "weights in float16": ("llama", {"dtype": torch.float16}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_of_a_checkpoint_is_served_as_transformers_does(tmp_path: Path, variant: str) -> None:
    family, settings = VARIANTS[variant]
    make_checkpoint(tmp_path, family, **settings)
    if "shard" in settings:
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
    driver, reference = Driver(tmp_path, max_batched_tokens=96), Reference(tmp_path)
    for prompt in (prompt_of(150), prompt_of(150)[:100] + prompt_of(30, seed=1)):
        check(driver.generate(prompt, 10), prompt, 10, reference)
