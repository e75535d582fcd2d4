"""Admission: which requests an engine refuses outright, and why.

Owns the limits of one engine and the sentences that explain them. A request that is sound but comes at a bad
time is the scheduler's business.
"""

from dataclasses import dataclass
from math import inf, isfinite

from replicas.engine import EngineRequest, RequestRefused
from replicas.protocol.frames import RefusalCode, SamplingParams, ServerError

NO_ADAPTER = ServerError(404, param="model", code="model_not_found")
"""For an adapter that has just gone."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """`capacity_tokens` is the KV cache's size; the model itself bears `context_length` tokens.

    `adapters` are the names of the loaded ones.
    """

    context_length: int
    capacity_tokens: int
    vocab_size: int
    adapters: frozenset[str] = frozenset()

    @property
    def max_total_tokens(self) -> int:
        """Most tokens of prompt and output. The last output token needs no KV, hence the one more."""
        return min(self.context_length, self.capacity_tokens + 1)


def check_admission(request: EngineRequest, limits: AdmissionLimits) -> None:
    """Raises RequestRefused if the request can never run on an engine with these limits."""
    problem = _length_problem(request, limits)
    if problem is not None:
        raise RequestRefused(RefusalCode.CONTEXT_LENGTH_EXCEEDED, problem)
    problem = _adapter_problem(request, limits)
    if problem is not None:
        raise RequestRefused(RefusalCode.INVALID_REQUEST, problem, NO_ADAPTER)
    problem = (
        _prompt_problem(request, limits)
        or _sampling_problem(request.sampling, limits)
        or _resumption_problem(request)
    )
    if problem is not None:
        raise RequestRefused(RefusalCode.INVALID_REQUEST, problem)


def _length_problem(request: EngineRequest, limits: AdmissionLimits) -> str | None:
    num_tokens = len(request.token_ids)
    if num_tokens > limits.context_length - 1:
        return (
            f"the prompt has {num_tokens} tokens; with a context length of {limits.context_length} "
            f"it may have {limits.context_length - 1}, so that one can follow"
        )
    if num_tokens > limits.capacity_tokens:
        return f"the prompt has {num_tokens} tokens; the whole KV cache holds {limits.capacity_tokens}"
    return None


def _adapter_problem(request: EngineRequest, limits: AdmissionLimits) -> str | None:
    adapter = request.submit.adapter
    if adapter is None or adapter in limits.adapters:
        return None
    known = ", ".join(sorted(limits.adapters))
    return f"there is no adapter {adapter!r}; this replica has {known or 'none'}"


def _prompt_problem(request: EngineRequest, limits: AdmissionLimits) -> str | None:
    token_ids, num_output_tokens = request.token_ids, request.submit.num_output_tokens
    if not 0 <= num_output_tokens <= len(token_ids):
        return f"{num_output_tokens} of {len(token_ids)} tokens cannot be output"
    if len(token_ids) == num_output_tokens:
        return "the prompt is empty"
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest >= limits.vocab_size:
        return (
            f"token id {lowest if lowest < 0 else highest} is outside the vocabulary of {limits.vocab_size}"
        )
    for span in request.submit.media:
        if span.start < 0 or span.length < 1 or span.start + span.length > len(token_ids):
            return f"media at tokens {span.start} to {span.start + span.length} lie outside the prompt"
    return None


def _resumption_problem(request: EngineRequest) -> str | None:
    if request.submit.num_output_tokens < request.sampling.max_tokens:
        return None
    return f"all {request.sampling.max_tokens} tokens of max_tokens are there already"


def _sampling_problem(sampling: SamplingParams, limits: AdmissionLimits) -> str | None:
    """Check the parameters for the replica's own sake: accepted ones must never make the sampler fail."""
    penalties = (sampling.presence_penalty, sampling.frequency_penalty)
    checks = (
        (sampling.max_tokens >= 1, f"max_tokens must be at least 1, not {sampling.max_tokens}"),
        (
            0 <= sampling.min_tokens <= sampling.max_tokens,
            f"min_tokens must lie between 0 and max_tokens, and is {sampling.min_tokens}",
        ),
        (
            isfinite(sampling.temperature) and sampling.temperature >= 0,
            f"temperature must be 0 or more, not {sampling.temperature}",
        ),
        (0 < sampling.top_p <= 1, f"top_p must lie above 0 and up to 1, not {sampling.top_p}"),
        (sampling.top_k >= 0, f"top_k must be 0 or more, not {sampling.top_k}"),
        (0 <= sampling.min_p <= 1, f"min_p must lie between 0 and 1, not {sampling.min_p}"),
        (
            isfinite(sampling.repetition_penalty) and sampling.repetition_penalty > 0,
            f"repetition_penalty must be above 0, not {sampling.repetition_penalty}",
        ),
        (all(map(isfinite, penalties)), "presence_penalty and frequency_penalty must be finite"),
        (all(bias < inf for _, bias in sampling.logit_bias), "a logit_bias is infinite, or not a number"),
        (
            all(0 <= token_id < limits.vocab_size for token_id, _ in sampling.logit_bias),
            f"a logit_bias names a token outside the vocabulary of {limits.vocab_size}",
        ),
        (
            sampling.num_logprobs is None or 0 <= sampling.num_logprobs <= limits.vocab_size,
            f"num_logprobs must lie between 0 and {limits.vocab_size}, not {sampling.num_logprobs}",
        ),
    )
    return next((problem for holds, problem in checks if not holds), None)
