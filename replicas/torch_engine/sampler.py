"""Sampler: from a row of logits to the next token of its request.

Owns the meaning of SamplingParams. The scheduler decides when a request ends.

A row takes these steps, each only if its request asks for it::

    logits → what the grammar forbids out
           + logit_bias → stop tokens out (min_tokens) → repetition, frequency, presence penalty
           → greedy: the largest
           → else: / temperature → min_p → top_k → top_p → inverse CDF at uniform(seed, n)

No generator is kept: the number that draws output token n is a hash of (seed, n). So a choice depends neither
on the rest of the batch nor on which replica drew the tokens before it. A grammar decides when an answer
under it may end.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from replicas.grammars.holding import GrammarHolder, HeldChoice
from replicas.protocol.frames import RequestKey, SamplingParams, TokenLogprobs
from replicas.scheduling.request import Request, SampledToken

_ROWS_AT_ONCE = 32
"""Rows drawn together: bounds the float64 scratch memory, rows times vocabulary."""
_SHORTLIST = 1024
"""Candidates among which top_p is looked for first; a full sort of the vocabulary is far slower."""


def uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1) that depends only on the arguments, the same on every machine."""
    counter = (seed % 2**64).to_bytes(8, "little") + index.to_bytes(8, "little")
    digest = hashlib.blake2b(counter, digest_size=8, person=b"kvasir-sample-v1").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Sampler:
    def __init__(self, eos_token_ids: Sequence[int], grammars: GrammarHolder | None = None) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._grammars = grammars

    def sample(self, requests: Sequence[Request], logits: torch.Tensor) -> dict[RequestKey, SampledToken]:
        """One token for each request from its row of float32 `logits` (changed in place)."""
        assert len(requests) == logits.shape[0]
        with torch.inference_mode():
            explained = [
                row for row, request in enumerate(requests) if request.sampling.num_logprobs is not None
            ]
            raw = logits[explained].log_softmax(dim=-1) if explained else None
            self._hold_to_grammars(requests, logits)
            for row, request in enumerate(requests):
                if _adjusts(request):
                    self._adjust(logits[row], request)
            token_ids: list[int] = logits.argmax(dim=-1).tolist()
            drawn = [row for row, request in enumerate(requests) if request.sampling.temperature > 0]
            for begin in range(0, len(drawn), _ROWS_AT_ONCE):
                rows = drawn[begin : begin + _ROWS_AT_ONCE]
                picks = _draw(logits[rows], [requests[row] for row in rows])
                for row, token_id in zip(rows, picks, strict=True):
                    token_ids[row] = token_id
            logprobs: dict[RequestKey, TokenLogprobs] = {}
            if raw is not None:
                logprobs = _logprobs(
                    raw, [requests[row] for row in explained], [token_ids[row] for row in explained]
                )
        return {
            request.key: SampledToken(token_id, logprobs.get(request.key))
            for request, token_id in zip(requests, token_ids, strict=True)
        }

    def _hold_to_grammars(self, requests: Sequence[Request], logits: torch.Tensor) -> None:
        held: dict[int, HeldChoice] = {}
        for row, request in enumerate(requests):
            if request.constraint is not None:
                assert isinstance(request.constraint, HeldChoice)
                held[row] = request.constraint
        if not held:
            return
        assert self._grammars is not None
        bits = self._grammars.masks(list(held.values())).view(np.uint8)
        forbidden = np.unpackbits(bits, axis=1, count=logits.shape[1], bitorder="little") == 0
        rows = _indices(list(held), logits)
        logits[rows] = logits[rows].masked_fill(torch.from_numpy(forbidden).to(logits.device), -torch.inf)

    def _adjust(self, row: torch.Tensor, request: Request) -> None:
        """Everything that changes which token is likeliest, in place."""
        sampling = request.sampling
        if sampling.logit_bias:
            ids, biases = zip(*sampling.logit_bias, strict=True)
            row.index_add_(0, _indices(ids, row), torch.tensor(biases, dtype=row.dtype, device=row.device))
        if request.num_output_tokens < sampling.min_tokens and request.constraint is None:
            ends = (
                sampling.stop_token_ids
                if sampling.ignore_eos
                else self._eos_token_ids + sampling.stop_token_ids
            )
            row[_indices([token for token in ends if 0 <= token < len(row)], row)] = -torch.inf
        if sampling.repetition_penalty != 1.0:
            seen = _indices(np.unique(np.array(request.token_ids, dtype=np.int64)), row)
            scores, penalty = row[seen], sampling.repetition_penalty
            row[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
        if sampling.frequency_penalty or sampling.presence_penalty:
            output = np.array(request.token_ids[request.num_prompt_tokens :], dtype=np.int64)
            distinct, counts = np.unique(output, return_counts=True)
            penalties = sampling.frequency_penalty * counts + sampling.presence_penalty
            row[_indices(distinct, row)] -= torch.from_numpy(penalties).to(row)


def _adjusts(request: Request) -> bool:
    sampling = request.sampling
    return bool(
        sampling.logit_bias
        or request.num_output_tokens < sampling.min_tokens
        or sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty
        or sampling.presence_penalty
    )


def _indices(ids: Sequence[int] | npt.NDArray[np.int64], row: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(ids, dtype=torch.int64, device=row.device)


def _draw(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """One token per row. The CDF runs in order of token ids, so two nearly equal logits never swap places."""
    params = [request.sampling for request in requests]
    temperatures = _column([sampling.temperature for sampling in params], logits).clamp_(1e-30, 1e30)
    # The largest becomes 0 first, so that a tiny temperature overflows to -inf at most.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures
    filtered = [row for row, sampling in enumerate(params) if _filters(sampling)]
    if filtered:
        subset = logits[filtered]
        cut = _cut(subset, [params[row] for row in filtered])
        logits[filtered] = subset.masked_fill(subset < cut, -torch.inf)
    cdf = logits.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    numbers = [uniform(request.seed, request.num_output_tokens) for request in requests]
    # The first token whose mass ends above the target; one without mass never is. The clamp is for NaN.
    targets = (_column(numbers, cdf) * cdf[:, -1:]).contiguous()
    picks = torch.searchsorted(cdf, targets, right=True).clamp_(max=logits.shape[1] - 1)
    return [int(pick) for pick in picks.squeeze(1).tolist()]


def _filters(sampling: SamplingParams) -> bool:
    return sampling.min_p > 0 or sampling.top_k > 0 or sampling.top_p < 1


def _cut(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return the smallest logit that min_p, top_k and top_p together keep in each row, whose largest is 0.

    All three keep the likeliest tokens, so one cut is enough; tokens equal to the cut stay together.
    """
    vocab_size = logits.shape[1]
    width = min(vocab_size, max(_SHORTLIST, *(sampling.top_k for sampling in params)))
    cut = _cut_within(logits, params, width)
    if cut is None:
        cut = _cut_within(logits, params, vocab_size)
    assert cut is not None
    return cut


def _cut_within(logits: torch.Tensor, params: Sequence[SamplingParams], width: int) -> torch.Tensor | None:
    """Return the cut if it lies among the `width` likeliest tokens of each row, which a full width always
    does."""
    vocab_size = logits.shape[1]
    best = logits.topk(width, dim=-1).values
    min_p_cut = _column([math.log(s.min_p) if s.min_p > 0 else -math.inf for s in params], logits)
    top_k = torch.tensor([[min(s.top_k, vocab_size) or vocab_size] for s in params], device=logits.device)
    # A top_k beyond the shortlist keeps every token of it.
    top_k_cut = torch.where(
        top_k <= width, best.gather(1, top_k.clamp(max=width) - 1), torch.full_like(min_p_cut, -torch.inf)
    )
    cut = torch.maximum(min_p_cut, top_k_cut)
    top_p = torch.tensor([[s.top_p] for s in params], dtype=torch.float64, device=logits.device)
    kept = torch.where(logits < cut, 0.0, logits.exp()).sum(dim=-1, keepdim=True, dtype=torch.float64)
    shares = torch.where(best < cut, 0.0, best.exp()).to(torch.float64) / kept
    reached = shares.cumsum(dim=-1)
    limited = top_p < 1
    if width < vocab_size and bool((limited & (reached[:, -1:] < top_p)).any()):
        return None
    # Token i stays if the likelier ones fall short of top_p; the likeliest always stays.
    num_kept = (reached - shares < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
    top_p_cut = torch.where(limited, best.gather(1, num_kept - 1), torch.full_like(cut, -torch.inf))
    return torch.maximum(cut, top_p_cut)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([[value] for value in values], dtype=like.dtype, device=like.device)


def _logprobs(
    raw: torch.Tensor, requests: Sequence[Request], token_ids: Sequence[int]
) -> dict[RequestKey, TokenLogprobs]:
    """Compute log-probabilities of the model's own distribution: before bias, penalties and temperature."""
    if not requests:
        return {}
    chosen = raw.gather(1, torch.tensor(token_ids, device=raw.device).unsqueeze(1)).squeeze(1).tolist()
    most = max(request.sampling.num_logprobs or 0 for request in requests)
    values, ids = raw.topk(most, dim=-1)
    top_values, top_ids = values.tolist(), ids.tolist()
    return {
        request.key: TokenLogprobs(
            token_id=token_ids[row],
            logprob=chosen[row],
            top=tuple(zip(top_ids[row], top_values[row], strict=True))[: request.sampling.num_logprobs or 0],
        )
        for row, request in enumerate(requests)
    }
