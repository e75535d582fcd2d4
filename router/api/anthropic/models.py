"""Anthropic's shape of models: one of them, and a page of the list.

Owns both, and the places at which a page may begin and end.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from msgspec import Struct

from router.api.json_body import check_range
from router.errors import InvalidRequest
from router.prompt.catalog import ServedModel
from router.shared.answer_types import Count

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000


class AnthropicModel(Struct, tag="model"):
    id: str
    display_name: str
    created_at: str
    lifecycle: str
    max_input_tokens: Count
    max_tokens: Count


class AnthropicModels(Struct):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_page(models: Mapping[str, ServedModel], query: Mapping[str, str]) -> AnthropicModels:
    """Raises InvalidRequest for a place that is none."""
    names = list(models)
    limit = _limit(query.get("limit"))
    after, before = query.get("after_id"), query.get("before_id")
    first, end = 0, len(names)
    if after is not None:
        first = _place("after_id", after, names) + 1
    if before is not None:
        end = _place("before_id", before, names)
    page = names[first:end][:limit] if before is None else names[first:end][-limit:]
    data = [model_object(name, models[name]) for name in page]
    return AnthropicModels(
        data, len(page) < end - first, data[0].id if data else None, data[-1].id if data else None
    )


def model_object(name: str, model: ServedModel) -> AnthropicModel:
    created = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    length = model.card.told_context_length
    return AnthropicModel(name, name, created, "active", length, length)


def _limit(asked: str | None) -> int:
    if asked is None:
        return DEFAULT_LIMIT
    if not asked.isdecimal() or not asked.isascii() or len(asked) > 6:
        raise InvalidRequest("Input should be an integer", parameter="limit")
    limit = int(asked)
    check_range("limit", limit, 1, MAX_LIMIT)
    return limit


def _place(field: str, name: str, names: Sequence[str]) -> int:
    try:
        return names.index(name)
    except ValueError:
        raise InvalidRequest("There is no such model", parameter=field) from None
