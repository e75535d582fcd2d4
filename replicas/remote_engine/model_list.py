"""Reading of a server's `/v1/models`: the names of its model, and the adapters on it.

Pure. Owns which entries are names of one model, and how many of them are taken.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from replicas.errors import StartupError
from replicas.protocol.bounds import MAX_CARD_NAMES, few, is_name
from replicas.protocol.status import Adapter, ModelCard
from replicas.remote_engine.dialect import NotThere
from replicas.remote_engine.facts import ServerModel

logger = logging.getLogger(__name__)

MODELS_PATH = "/v1/models"
MOST_CONTEXT = 2**31


class _ModelEntry(msgspec.Struct):
    """One model or adapter. `aliases` is llama.cpp's field. Any value may be anything."""

    id: Any
    owned_by: Any = None
    root: Any = None
    parent: Any = None
    max_model_len: Any = None
    meta: Any = None
    aliases: Any = None

    @property
    def context_length(self) -> int | None:
        """By vLLM's field, or by llama.cpp's."""
        context = self.max_model_len or (self.meta.get("n_ctx") if isinstance(self.meta, dict) else None)
        return context if isinstance(context, int) and 0 < context <= MOST_CONTEXT else None


class _List(msgspec.Struct):
    data: list[_ModelEntry]


def read_models(text: bytes, served_name: str | None) -> ServerModel:
    """Find a model; `served_name` None takes the first that is no adapter. Entries with its root and no
    parent are its other names. Raises NotThere if it is not listed, and StartupError for what is no list."""
    try:
        entries = {str(each.id): each for each in msgspec.json.decode(text, type=_List).data}
        models = [name for name, each in entries.items() if not each.parent]
        name = next(iter(models or entries)) if served_name is None else served_name
    except (msgspec.MsgspecError, ValueError, StopIteration, RecursionError) as error:
        raise StartupError(f"the server's list of models cannot be read: {error!r}") from error
    entry = entries.get(name)
    if entry is None:
        raise NotThere(f"the server has no model {few([name])}; it has {few(filter(is_name, entries))}")
    root = str(entry.root or name)
    others = [each for each in models if entry.root and not entry.parent and entries[each].root == root]
    if isinstance(entry.aliases, list):
        others += [each for each in entry.aliases if isinstance(each, str)]
    aliases = [each for each in dict.fromkeys(others) if each != name]
    taken = _taken(aliases)
    parents = {name, *taken}
    adapters = [
        each for each, other in entries.items() if isinstance(other.parent, str) and other.parent in parents
    ]
    taken_adapters = _taken(adapters)
    return ServerModel(
        name,
        root,
        entry.context_length,
        tuple(Adapter(each, _digest(f"{root}\0{each}\0{entries[each].root}")) for each in taken_adapters),
        tuple(taken),
        len(aliases) + len(adapters) - len(taken) - len(taken_adapters),
        str(entry.owned_by or ""),
    )


def with_names(card: ModelCard, model: ServerModel) -> ModelCard:
    """Return the card with the names and adapters that the server lists now, and log a change. A model with a
    name of our own has that one alone: of equal servers two may be two models here."""
    names = (model.served_name, *model.aliases)
    aliases = tuple(each for each in names if each != card.name) if card.name in names else ()
    if (aliases, model.adapters) == (card.aliases, card.adapters):
        return card
    adapters = [adapter.name for adapter in model.adapters]
    logger.info("the server's other names: %s; adapters: %s", few(aliases) or "none", few(adapters) or "none")
    if model.num_ignored:
        logger.warning("%d names of the server are ignored: too many, or no names", model.num_ignored)
    return replace(card, aliases=aliases, adapters=model.adapters)


def _taken(names: Sequence[str]) -> list[str]:
    return [name for name in names[:MAX_CARD_NAMES] if is_name(name)]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
