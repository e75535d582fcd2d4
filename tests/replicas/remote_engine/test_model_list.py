"""What of a server's list of models is a name of its model, and what of it is believed."""

import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from replicas.errors import StartupError
from replicas.protocol.bounds import MAX_CARD_NAMES, MAX_NAME_CHARACTERS
from replicas.protocol.wire import DescribeResponse, decode_description, encode
from replicas.remote_engine.dialect import NotThere
from replicas.remote_engine.model_list import read_models, with_names
from tests.own_log import own_records
from tests.replicas.scripted_engine import CARD

TOY = {"id": "toy", "root": "/models/toy", "parent": None, "max_model_len": 512}
ALIAS = {**TOY, "id": "gpt-4o"}
TUNED = {"id": "tuned", "root": "/adapters/tuned", "parent": "toy"}


def listed(*entries: Any) -> bytes:
    return json.dumps({"object": "list", "data": entries}).encode()


@pytest.mark.parametrize(
    ("entries", "wanted", "name", "aliases", "adapters"),
    [
        ([TOY, ALIAS], None, "toy", ["gpt-4o"], []),
        ([TOY, ALIAS], "gpt-4o", "gpt-4o", ["toy"], []),
        ([TUNED, TOY, ALIAS], None, "toy", ["gpt-4o"], ["tuned"]),
        ([TOY, ALIAS, {**TUNED, "parent": "gpt-4o"}], None, "toy", ["gpt-4o"], ["tuned"]),
        ([TOY, {**TUNED, "parent": "other"}], None, "toy", [], []),
        ([TOY, TOY, ALIAS, ALIAS], None, "toy", ["gpt-4o"], []),
        # Other models, as Ollama and vendors list them.
        ([TOY, {**ALIAS, "root": "/models/other"}], None, "toy", [], []),
        ([{"id": "a"}, {"id": "b"}], None, "a", [], []),
        ([{"id": "a", "root": None}, {"id": "b", "root": None}], None, "a", [], []),
        ([{"id": "a", "root": ""}, {"id": "b", "root": ""}], None, "a", [], []),
        ([TUNED, {**TUNED, "id": "tuned-2"}], "tuned", "tuned", [], []),
        # llama.cpp's.
        ([{"id": "a", "aliases": ["b", "a", 7]}], None, "a", ["b"], []),
        # What may be anything.
        ([TOY, {"id": 7, "root": [], "parent": {}, "aliases": 7, "meta": []}], None, "toy", [], []),
        ([TOY, {**ALIAS, "parent": ["toy"]}], None, "toy", [], []),
    ],
)
def test_entries_of_one_root_are_names_of_one_model(
    entries: list[Any], wanted: str | None, name: str, aliases: list[str], adapters: list[str]
) -> None:
    model = read_models(listed(*entries), wanted)
    assert (model.served_name, list(model.aliases)) == (name, aliases)
    assert [adapter.name for adapter in model.adapters] == adapters
    card = with_names(replace(CARD, name=name), model)
    assert (list(card.aliases), card.adapters) == (aliases, model.adapters)


@pytest.mark.parametrize(("owner", "is_router"), [("kvasir", True), ("vllm", False), ([], False)])
def test_a_router_of_kvasir_is_known_by_its_models_owner(owner: Any, is_router: bool) -> None:
    model = read_models(listed({**TOY, "owned_by": owner}, {**ALIAS, "owned_by": owner}), None)
    assert (model.is_router, model.aliases) == (is_router, ("gpt-4o",))


def test_an_adapter_is_told_from_another_one_of_its_name_by_where_it_lies() -> None:
    def fingerprint(root: str, base: str = "/models/toy") -> str:
        (adapter,) = read_models(listed({**TOY, "root": base}, {**TUNED, "root": root}), None).adapters
        return adapter.fingerprint

    assert fingerprint("/a") == fingerprint("/a")
    assert len({fingerprint("/a"), fingerprint("/b"), fingerprint("/a", "/models/other")}) == 3


def test_a_model_that_was_given_a_name_of_ours_has_none_of_its_servers() -> None:
    model = read_models(listed(TOY, ALIAS, TUNED), None)
    card = with_names(replace(CARD, name="ours"), model)
    assert (card.aliases, card.adapters) == ((), model.adapters)
    assert with_names(replace(CARD, name="gpt-4o"), model).aliases == ("toy",)


def test_a_list_of_a_million_names_or_of_endless_ones_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    odd = ["", "two\nlines", "x" * 2**20, "\x00"]
    entries = [
        *({**ALIAS, "id": each} for each in odd),
        *({"id": f"n{number}", "root": "/models/toy"} for number in range(100_000)),
        *({"id": f"a{number}", "parent": "toy"} for number in range(100_000)),
    ]
    text = listed(TOY, *entries)
    card = with_names(replace(CARD, name="toy"), read_models(text, None))
    assert len(card.aliases) == MAX_CARD_NAMES - len(odd)
    assert len(card.adapters) == MAX_CARD_NAMES
    assert max(map(len, card.aliases)) <= MAX_NAME_CHARACTERS
    decode_description(encode(DescribeResponse(card, "r0", "e0")))  # type: ignore[arg-type]
    (warned,) = own_records(caplog, logging.WARNING)
    assert "names of the server are ignored" in warned.message
    assert with_names(card, read_models(text, None)) is card
    with pytest.raises(NotThere) as refused:
        read_models(text, "other")
    assert len(str(refused.value)) < 1000
    assert all(len(record.message) < 1000 for record in own_records(caplog, logging.INFO))


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"<html>", b"[]", b'{"data": {}}', b'{"data": []}', b'{"data": [7]}'),
        *(b'{"data": [{"name": 1}]}', b'{"data": [{"id": "\xff"}]}'),
        *(beginning + b"[" * 100_000 for beginning in (b'{"data": ', b'{"data": [{"id": ')),
    ],
)
def test_lists_that_are_none(text: bytes) -> None:
    with pytest.raises(StartupError, match="list of models cannot be read"):
        read_models(text, None)


@pytest.mark.parametrize(
    ("fields", "context_length"),
    [
        ({"max_model_len": 512}, 512),
        ({"meta": {"n_ctx": 512}}, 512),
        *(({"max_model_len": wrong}, None) for wrong in (None, 0, -1, "512", 2**40, 1.5, [])),
    ],
)
def test_a_context_is_told_or_not(fields: dict[str, Any], context_length: int | None) -> None:
    assert read_models(listed({"id": "toy", **fields}), None).context_length == context_length
