"""Translates how to continue a prompt to vLLM, and its logprobs back.

Owns the translation. Imports vLLM.

vLLM has no resumed generations: to it, all given tokens are prompt. So everything that counts output is
corrected here. `max_tokens` and `min_tokens` shrink by the existing output. Its frequency and presence
penalties become a logit bias: exact for frequency, but a repeated token pays its presence penalty twice. vLLM
draws from a generator per request that starts with the seed, and cannot start in the middle: a resumed
request that samples continues from a seed of its own, the same wherever it is resumed, but with other tokens
than without the interruption. Greedy ones continue as if uninterrupted.
"""

import hashlib
from collections import Counter, defaultdict
from typing import Any

from vllm import SamplingParams as VllmSamplingParams
from vllm.sampling_params import RequestOutputKind

from replicas.engine import EngineRequest
from replicas.protocol.frames import TokenLogprobs


def vllm_sampling(request: EngineRequest, eos_token_ids: tuple[int, ...]) -> Any:
    """Raises VLLMValidationError where vLLM's limits are narrower than ours."""
    sampling, num_output_tokens = request.sampling, request.submit.num_output_tokens
    # Of an answer that is held to a grammar, the grammar says where it may end.
    is_held = bool(sampling.grammar)
    has_no_end = sampling.ignore_eos and not is_held
    ends = sampling.stop_token_ids if has_no_end else (*eos_token_ids, *sampling.stop_token_ids)
    return VllmSamplingParams(
        max_tokens=sampling.max_tokens - num_output_tokens,
        min_tokens=0 if is_held else max(0, sampling.min_tokens - num_output_tokens),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=_seed(request.seed, num_output_tokens),
        logit_bias=_logit_bias(request) or None,
        # The end-of-sequence tokens are stop tokens here: vLLM knows but one of them without a tokenizer.
        stop_token_ids=list(ends),
        ignore_eos=True,
        logprobs=sampling.num_logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def token_logprobs(token_id: int, candidates: Any, num_logprobs: int) -> TokenLogprobs:
    """`candidates` maps token ids to vLLM's logprobs: the likeliest ones, and the sampled one."""
    ranked = sorted(candidates.items(), key=lambda item: item[1].rank)
    top = tuple((int(candidate), float(entry.logprob)) for candidate, entry in ranked[:num_logprobs])
    return TokenLogprobs(token_id, float(candidates[token_id].logprob), top)


def _seed(seed: int, num_output_tokens: int) -> int:
    if num_output_tokens == 0:
        return seed
    counter = seed.to_bytes(8, "little") + num_output_tokens.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(counter, digest_size=8, person=b"kvasir-resume-v1").digest())


def _logit_bias(request: EngineRequest) -> dict[int, float]:
    sampling, num_output_tokens = request.sampling, request.submit.num_output_tokens
    biases: defaultdict[int, float] = defaultdict(float)
    for token_id, bias in sampling.logit_bias:
        biases[token_id] += bias
    if num_output_tokens and (sampling.frequency_penalty or sampling.presence_penalty):
        for token_id, count in Counter(request.token_ids[-num_output_tokens:]).items():
            biases[token_id] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return dict(biases)
