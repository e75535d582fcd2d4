"""The sampler against a slow and obvious twin in float64, and against exact distributions."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from replicas.scheduling.request import Request
from replicas.torch_engine.sampler import Sampler, uniform
from tests.replicas.builders import engine_request
from tests.replicas.torch_engine.driving import DEVICE

EOS = (3, 7)
GOLDEN = [0.7385175919370364, 0.9921657131138244, 0.7204581523588903]


def request_of(
    index: int = 0, *, prompt: Sequence[int] = (0,), output: Sequence[int] = (), **sampling: Any
) -> Request:
    fields = {"max_tokens": 100, "num_output_tokens": len(output), **sampling}
    return Request(engine_request([*prompt, *output], serial=index, **fields), index)


def sample(request: Request, logits: torch.Tensor) -> int:
    return Sampler(EOS).sample([request], logits.unsqueeze(0).clone())[request.key].token_id


def logits_of(vocab_size: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    drawn = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    return drawn.to(DEVICE)


def adjusted(request: Request, logits: torch.Tensor) -> list[float]:
    """Twin of what bias, min_tokens and penalties do."""
    sampling = request.sampling
    scores = [float(score) for score in logits]
    output = request.token_ids[request.num_prompt_tokens :]
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    if len(output) < sampling.min_tokens:
        for token in (*sampling.stop_token_ids, *(() if sampling.ignore_eos else EOS)):
            if token < len(scores):
                scores[token] = -math.inf
    for token in set(request.token_ids):
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token, count in Counter(output).items():
        scores[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return scores


def distribution(request: Request, logits: torch.Tensor) -> list[float]:
    """Twin of the whole: the probability of every token, from first principles."""
    sampling = request.sampling
    scores = adjusted(request, logits)
    if sampling.temperature == 0:
        best = scores.index(max(scores))
        return [float(token == best) for token in range(len(scores))]
    highest = max(scores)
    weights = [math.exp((score - highest) / sampling.temperature) for score in scores]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = [token for token in order if weights[token] >= sampling.min_p * weights[order[0]]]
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    total, nucleus, mass = sum(weights[token] for token in kept), [], 0.0
    for token in kept:
        if mass < sampling.top_p * total:
            nucleus.append(token)
        mass += weights[token]
    total = sum(weights[token] for token in nucleus)
    probabilities = [0.0] * len(weights)
    for token in nucleus:
        probabilities[token] = weights[token] / total
    return probabilities


PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.6},
    "high temperature": {"temperature": 3.0},
    "top_p": {"top_p": 0.7},
    "tiny top_p": {"top_p": 1e-6},
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
    "top_k above the vocabulary": {"top_k": 2**62},
    "min_p": {"min_p": 0.1},
    "min_p of one": {"min_p": 1.0},
    "repetition penalty": {"repetition_penalty": 1.8},
    "repetition reward": {"repetition_penalty": 0.5},
    "presence penalty": {"presence_penalty": 1.5},
    "frequency penalty": {"frequency_penalty": 0.7},
    "negative penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.3},
    "logit_bias": {"logit_bias": ((1, 4.0), (2, -100.0), (9, 2.5))},
    "logit_bias forbidding": {"logit_bias": tuple((token, -math.inf) for token in range(30))},
    "min_tokens": {"min_tokens": 10, "stop_token_ids": (4, 5, 10_000)},
    "min_tokens ignoring EOS": {"min_tokens": 10, "stop_token_ids": (4,), "ignore_eos": True},
    "min_tokens reached": {"min_tokens": 6, "stop_token_ids": (4, 5)},
    "penalties, greedy": {"temperature": 0.0, "repetition_penalty": 3.0, "presence_penalty": 2.0},
    "all filters": {"temperature": 1.3, "top_p": 0.9, "top_k": 12, "min_p": 0.02},
    "everything": {
        "temperature": 1.7,
        "top_p": 0.8,
        "top_k": 20,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": ((5, 1.0), (6, 2.0)),
        "min_tokens": 50,
    },
}
PROMPT, OUTPUT = (1, 2, 8, 8, 20), (8, 3, 4, 4, 4, 30)


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("vocab_size", [40, 3000])
def test_every_parameter_picks_the_token_that_the_twin_picks(name: str, vocab_size: int) -> None:
    for seed in range(8):
        logits = logits_of(vocab_size, seed)
        request = request_of(prompt=PROMPT, output=OUTPUT, seed=seed, **PARAMETERS[name])
        target = uniform(seed, len(OUTPUT))
        cumulated = list(itertools.accumulate(distribution(request, logits)))
        expected = next(token for token, mass in enumerate(cumulated) if mass > target)
        if min(abs(mass - target) for mass in cumulated) > 1e-6:
            assert sample(request, logits) == expected


@pytest.mark.parametrize("name", PARAMETERS)
def test_tokens_come_as_often_as_their_exact_probability_says(name: str) -> None:
    logits = logits_of(40, seed=1)
    requests = [
        request_of(seed, prompt=PROMPT, output=OUTPUT, seed=seed, **PARAMETERS[name]) for seed in range(1500)
    ]
    sampled = Sampler(EOS).sample(requests, logits.repeat(len(requests), 1))
    counts = Counter(token.token_id for token in sampled.values())
    statistic, num_cells = 0.0, 0
    rare_expected = rare_seen = 0.0
    for token, probability in enumerate(distribution(requests[0], logits)):
        expected = probability * len(requests)
        assert expected > 0 or counts[token] == 0
        if expected >= 5:
            statistic += (counts[token] - expected) ** 2 / expected
            num_cells += 1
        else:
            rare_expected, rare_seen = rare_expected + expected, rare_seen + counts[token]
    freedom = max(1, num_cells - 1)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)
    assert abs(rare_seen - rare_expected) < 4 * math.sqrt(rare_expected) + 3


@pytest.mark.parametrize(("likeliest", "other"), [(0.9, 0.6), (2.0, 1.1), (-0.5, -0.9)])
def test_the_repetition_penalty_pushes_either_sign_down(likeliest: float, other: float) -> None:
    logits = torch.tensor([likeliest, other, -9.0])
    for seen_in in ({"prompt": (0, 2)}, {"prompt": (2,), "output": (0,)}):
        assert sample(request_of(temperature=0.0, **seen_in), logits) == 0
        assert sample(request_of(temperature=0.0, repetition_penalty=2.0, **seen_in), logits) == 1


@pytest.mark.parametrize("end", [3, 4])
def test_stopping_tokens_are_out_of_reach_until_min_tokens_are_there(end: int) -> None:
    logits = torch.zeros(40)
    logits[end] = 9.0
    for num_output, reachable in ((0, False), (5, False), (6, True), (7, True)):
        for bias in ((), ((20, 1.0),)):
            request = request_of(
                output=[1] * num_output, min_tokens=6, stop_token_ids=(4,), temperature=0.0, logit_bias=bias
            )
            assert (sample(request, logits) == end) == reachable


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_a_flat_distribution_finds_its_nucleus_beyond_the_shortlist(top_p: float) -> None:
    logits = logits_of(5000, spread=0.01)
    allowed = distribution(request_of(top_p=top_p), logits)
    requests = [request_of(seed, seed=seed, top_p=top_p) for seed in range(96)]
    sampled = Sampler(EOS).sample(requests, logits.repeat(len(requests), 1))
    boundary = min(probability for probability in allowed if probability > 0)
    for token in sampled.values():
        near = math.exp(float(logits[token.token_id])) >= 0.99999 * boundary
        assert allowed[token.token_id] > 0 or near
    shortlist = set(logits.topk(1024).indices.tolist())
    assert any(token.token_id not in shortlist for token in sampled.values())


def test_who_else_is_in_the_batch_never_matters() -> None:
    rng = random.Random(5)
    names = list(PARAMETERS)
    requests = [
        request_of(index, prompt=PROMPT, output=OUTPUT, seed=index, **PARAMETERS[rng.choice(names)])
        for index in range(70)
    ]
    rows = torch.stack([logits_of(300, seed) for seed in range(70)])
    together = Sampler(EOS).sample(requests, rows.clone())
    for request, row in zip(requests, rows, strict=True):
        assert together[request.key].token_id == sample(request, row)


def test_the_nth_token_depends_on_seed_and_n_alone() -> None:
    logits = logits_of(500)
    fresh = [sample(request_of(output=[1] * n, seed=9), logits) for n in range(20)]
    again = [sample(request_of(prompt=(5, 6), output=[2] * n, seed=9), logits) for n in range(20)]
    other = [sample(request_of(output=[1] * n, seed=10), logits) for n in range(20)]
    assert fresh == again
    assert fresh != other


@pytest.mark.parametrize(("number", "expected"), [(0.0, 2), (1 - 2**-53, 36)])
def test_numbers_at_either_end_never_draw_an_impossible_token(
    monkeypatch: pytest.MonkeyPatch, number: float, expected: int
) -> None:
    monkeypatch.setattr("replicas.torch_engine.sampler.uniform", lambda seed, index: number)
    forbidden = tuple((token, -math.inf) for token in (0, 1, 37, 38, 39))
    assert sample(request_of(logit_bias=forbidden), logits_of(40)) == expected


def test_uniform_numbers_are_those_that_replicas_have_always_drawn() -> None:
    """Replicas of two versions must agree, or a generation that moves between them changes course."""
    assert [uniform(0, 0), uniform(0, 1), uniform(2**64 - 1, 5)] == GOLDEN
    assert all(0 <= uniform(seed, 0) < 1 for seed in range(1000))


@pytest.mark.parametrize("num_logprobs", [0, 1, 5])
def test_logprobs_are_those_of_the_model_before_anything_is_applied(num_logprobs: int) -> None:
    rows = torch.stack([logits_of(50, seed) for seed in range(3)])
    settings: dict[str, Any] = {
        "temperature": 0.5,
        "logit_bias": ((4, 20.0),),
        "repetition_penalty": 2.0,
        "top_k": 3,
    }
    requests = [
        request_of(0, num_logprobs=num_logprobs, **settings),
        request_of(1, **settings),
        request_of(2, num_logprobs=2, temperature=0.0),
    ]
    sampled = Sampler(EOS).sample(requests, rows.clone())
    assert sampled[requests[1].key].logprobs is None
    for row, num_top in ((0, num_logprobs), (2, 2)):
        expected = rows[row].double().log_softmax(dim=-1)
        token = sampled[requests[row].key]
        assert token.logprobs is not None
        assert token.logprobs.token_id == token.token_id
        assert token.logprobs.logprob == pytest.approx(float(expected[token.token_id]), abs=1e-5)
        best = expected.topk(num_top)
        assert [token_id for token_id, _ in token.logprobs.top] == best.indices.tolist()
        assert [value for _, value in token.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1e-320},
        {"temperature": 1e308},
        {"seed": -1},
        {"seed": 2**70},
        {"repetition_penalty": 1e-320},
        {"repetition_penalty": 1e308},
        {"frequency_penalty": -1e308},
        {"logit_bias": ((0, 1e308),)},
        {"logit_bias": tuple((token, -math.inf) for token in range(40))},
        {"min_tokens": 5, "stop_token_ids": tuple(range(40))},
        {"top_p": 5e-324},
        {"min_p": 5e-324},
    ],
    ids=str,
)
def test_parameters_at_the_edge_of_sense_still_yield_a_token(sampling: dict[str, Any]) -> None:
    assert 0 <= sample(request_of(prompt=(0, 1), output=(2,), **sampling), logits_of(40)) < 40


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_a_number_yields_a_token_and_leaves_its_neighbour_alone(temperature: float) -> None:
    logits = logits_of(40)
    broken, sound = request_of(0, temperature=temperature), request_of(1, temperature=temperature, top_k=5)
    sampled = Sampler(EOS).sample([broken, sound], torch.stack((torch.full_like(logits, torch.nan), logits)))
    assert 0 <= sampled[broken.key].token_id < 40
    assert sampled[sound.key].token_id == sample(sound, logits)
