"""How to continue a resumed generation at an engine to which all given tokens are prompt.

Pure. What counts output is corrected: penalties become a logit bias (exact for frequency; a repeated token
pays its presence penalty twice), and a request that samples continues from a seed of its own, the same
wherever it is resumed, but with other tokens than without the interruption. Greedy ones continue as if
uninterrupted.
"""

import hashlib
from collections import Counter, defaultdict

from replicas.engine import EngineRequest


def resumed_seed(request: EngineRequest) -> int:
    """Return the request's own seed, if nothing was generated yet."""
    num_output_tokens = request.submit.num_output_tokens
    if num_output_tokens == 0:
        return request.seed
    counter = request.seed.to_bytes(8, "little") + num_output_tokens.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(counter, digest_size=8, person=b"kvasir-resume-v1").digest())


def resumed_logit_bias(request: EngineRequest) -> dict[int, float]:
    sampling, num_output_tokens = request.sampling, request.submit.num_output_tokens
    biases: defaultdict[int, float] = defaultdict(float)
    for token_id, bias in sampling.logit_bias:
        biases[token_id] += bias
    if num_output_tokens and (sampling.frequency_penalty or sampling.presence_penalty):
        for token_id, count in Counter(request.token_ids[-num_output_tokens:]).items():
            biases[token_id] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return dict(biases)


def end_token_ids(request: EngineRequest, eos_token_ids: tuple[int, ...]) -> list[int]:
    """Tokens that end the answer. One that is held to a grammar ends where that says, so these stay."""
    sampling = request.sampling
    has_no_end = sampling.ignore_eos and not sampling.grammar
    return list(sampling.stop_token_ids if has_no_end else (*eos_token_ids, *sampling.stop_token_ids))
