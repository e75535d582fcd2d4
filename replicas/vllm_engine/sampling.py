"""Translates how to continue a prompt to vLLM, and its logprobs back.

Owns the translation. Imports vLLM.

vLLM has no resumed generations: `max_tokens` and `min_tokens` shrink by the existing output, and
`replicas/scheduling/resuming.py` corrects the rest.
"""

from typing import Any

from vllm import SamplingParams as VllmSamplingParams
from vllm.sampling_params import RequestOutputKind

from replicas.engine import EngineRequest
from replicas.protocol.frames import TokenLogprobs
from replicas.scheduling.resuming import end_token_ids, resumed_logit_bias, resumed_seed


def vllm_sampling(request: EngineRequest, eos_token_ids: tuple[int, ...]) -> Any:
    """Raises VLLMValidationError where vLLM's limits are narrower than ours."""
    sampling, num_output_tokens = request.sampling, request.submit.num_output_tokens
    # Of an answer that is held to a grammar, the grammar says where it may end.
    is_held = bool(sampling.grammar)
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
        seed=resumed_seed(request),
        logit_bias=resumed_logit_bias(request) or None,
        # The end-of-sequence tokens are stop tokens here: vLLM knows but one of them without a tokenizer.
        stop_token_ids=end_token_ids(request, eos_token_ids),
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
