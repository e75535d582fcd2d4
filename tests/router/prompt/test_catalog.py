"""ModelCatalog: names, replacement, namespaces."""

import dataclasses
import logging

import pytest

from replicas.protocol.blocks import (
    HASH_BYTES,
    BlockHash,
    ImageTokens,
    Namespace,
    PublishedBeginning,
    hash_blocks,
    namespace_root,
    pack_token_ids,
)
from replicas.protocol.frames import NO_USER
from replicas.protocol.status import Adapter, ModelCard, ReplicaId
from router.errors import NoReplicaAvailable, UnknownModel
from router.prompt.catalog import ModelCatalog
from tests.own_log import own_records
from tests.router import tiny_model


def test_while_no_model_is_known_nobody_is_told_that_theirs_does_not_exist() -> None:
    with pytest.raises(NoReplicaAvailable):
        ModelCatalog(tiny_model.SECRET).get("somebody")


def test_a_new_card_replaces_the_old_and_keeps_the_tokenizer_with_its_cache() -> None:
    catalog = ModelCatalog(tiny_model.SECRET)
    catalog.add(tiny_model.card(), tiny_model.bundle())
    tokenizer = catalog.get(tiny_model.MODEL).tokenizer
    catalog.add(dataclasses.replace(tiny_model.card(), context_length=7), tiny_model.bundle())
    assert catalog.get(tiny_model.MODEL).card.context_length == 7
    assert catalog.get(tiny_model.MODEL).tokenizer is tokenizer
    catalog.add(tiny_model.card(), tiny_model.bundle("another template"))
    assert catalog.get(tiny_model.MODEL).tokenizer is not tokenizer


def test_roots_are_those_of_the_namespace_and_differ_with_tenant_salt_and_secret() -> None:
    model = tiny_model.catalog().get(tiny_model.MODEL)
    fingerprint = bytes.fromhex(model.card.fingerprint)
    expected = namespace_root(tiny_model.SECRET, Namespace(fingerprint, tiny_model.BLOCK_SIZE, salt="s"))
    assert model.root(None, "s") == expected
    other = ModelCatalog(b"another secret of enough bytes")
    other.add(tiny_model.card(), tiny_model.bundle())
    roots = [
        model.root(),
        model.root("a"),
        model.root(None, "a"),
        model.root("a", "a"),
        other.get(model.card.name).root(),
    ]
    assert len(set(roots)) == len(roots)


@pytest.mark.parametrize("published", [None, PublishedBeginning(BlockHash(bytes(HASH_BYTES)), 20)])
def test_block_hashes_are_those_of_everyone_where_prompts_have_media_and_a_published_beginning(
    published: PublishedBeginning | None,
) -> None:
    model = tiny_model.catalog().get(tiny_model.MODEL)
    root, size = model.root("us"), tiny_model.BLOCK_SIZE
    token_ids = list(range(50 * size + 1))
    media = [ImageTokens(b"an image", 19 * size - 1, size + 3), ImageTokens(b"another", 40 * size, 1)]
    expected = hash_blocks(root, token_ids, size, media=media, published=published)
    for _ in range(3):
        assert model.block_hashes(root, pack_token_ids(token_ids), published, media) == expected
    assert model.block_hashes(root, pack_token_ids(token_ids), published, media[:1])[:40] == expected[:40]


SQL = Adapter("sql", "a1" * 16)
POETRY = Adapter("poetry", "b2" * 16)


def replicas(
    *loaded: Adapter | str | None, model: str = tiny_model.MODEL
) -> list[tuple[ReplicaId, ModelCard]]:
    """One for each adapter, other name, or None for a bare one."""
    return [
        (
            ReplicaId(f"r{number}"),
            dataclasses.replace(
                tiny_model.card(model),
                adapters=(each,) if isinstance(each, Adapter) else (),
                aliases=(each,) if isinstance(each, str) else (),
            ),
        )
        for number, each in enumerate(loaded)
    ]


def catalog_with(*loaded: Adapter | str) -> ModelCatalog:
    catalog = ModelCatalog(tiny_model.SECRET)
    catalog.add(tiny_model.card(), tiny_model.bundle())
    catalog.set_cards(tiny_model.MODEL, replicas(*loaded))
    return catalog


def test_an_adapter_is_its_model_under_a_name_of_its_own() -> None:
    catalog = catalog_with(SQL, POETRY)
    model, adapted = catalog.get(tiny_model.MODEL), catalog.get("sql")
    assert (model.name, model.adapter) == (tiny_model.MODEL, None)
    assert (adapted.name, adapted.adapter) == ("sql", SQL)
    assert (adapted.card, adapted.tokenizer, adapted.template) == (
        model.card,
        model.tokenizer,
        model.template,
    )
    assert adapted.system_fingerprint != model.system_fingerprint
    assert catalog.get("sql") is adapted
    assert (catalog.names(), catalog.all_names()) == ([tiny_model.MODEL], [tiny_model.MODEL, "poetry", "sql"])
    with pytest.raises(UnknownModel, match="prose"):
        catalog.get("prose")


def test_no_two_of_a_model_its_adapters_and_their_versions_share_a_root() -> None:
    names = [tiny_model.MODEL, "sql", "poetry"]
    roots = [catalog_with(SQL, POETRY).get(name).root(None, salt) for name in names for salt in (None, "s")]
    roots.append(catalog_with(Adapter("sql", "ff" * 16)).get("sql").root())
    assert len(set(roots)) == len(roots)
    fingerprint = bytes.fromhex(tiny_model.card().fingerprint)
    namespace = Namespace(fingerprint, tiny_model.BLOCK_SIZE, adapter=f"sql:{SQL.fingerprint}")
    assert catalog_with(SQL).get("sql").root() == namespace_root(tiny_model.SECRET, namespace)


def test_another_name_of_a_model_is_the_model() -> None:
    catalog = catalog_with("gpt-4o", SQL)
    assert catalog.get("gpt-4o") is catalog.get(tiny_model.MODEL)
    assert catalog.names() == [tiny_model.MODEL]
    assert catalog.all_names() == [tiny_model.MODEL, "gpt-4o", "sql"]
    with pytest.raises(UnknownModel, match=rf"'gpt-5'.*Served here: {tiny_model.MODEL}, gpt-4o, sql\."):
        catalog.get("gpt-5")
    catalog.set_cards(tiny_model.MODEL, replicas(*(f"name{number}" for number in range(1000))))
    with pytest.raises(UnknownModel) as refused:
        catalog.get("x" * 10_000)
    assert len(refused.value.message) < 700


@pytest.mark.parametrize("name", [SQL, "sql"])
def test_a_name_without_replicas_stays_known_until_its_last_one_is_there_without_it(
    name: Adapter | str,
) -> None:
    catalog = catalog_with(name)
    for others in ([], replicas(None, None)[1:]):
        catalog.set_cards(tiny_model.MODEL, others)
        assert catalog.is_served("sql")
    catalog.set_cards(tiny_model.MODEL, replicas(None, None))
    assert not catalog.is_served("sql")
    assert catalog.all_names() == [tiny_model.MODEL]


def test_adapters_that_come_and_go_leave_nothing_behind() -> None:
    catalog = catalog_with()
    for number in range(10):
        catalog.set_cards(tiny_model.MODEL, replicas(Adapter("sql", f"{number:064x}")))
        catalog.get("sql")
    assert len(catalog.get(tiny_model.MODEL)._adapted) == 1


def test_an_adapter_follows_its_model_to_a_new_card() -> None:
    catalog = catalog_with(SQL)
    before = catalog.get("sql").root()
    catalog.add(dataclasses.replace(tiny_model.card(), fingerprint="cd" * 16), tiny_model.bundle())
    assert catalog.get("sql").card.fingerprint == "cd" * 16
    assert catalog.get("sql").root() != before


def test_a_name_that_is_a_models_is_never_an_adapters(caplog: pytest.LogCaptureFixture) -> None:
    own = Adapter(tiny_model.MODEL, "a1" * 16)
    catalog = catalog_with(own, SQL)
    catalog.set_cards(tiny_model.MODEL, replicas(SQL, own))
    assert catalog.get(tiny_model.MODEL).adapter is None
    assert len(own_records(caplog, logging.WARNING)) == 1
    catalog.add(tiny_model.card("sql"), tiny_model.bundle())  # a model that comes later
    catalog.set_cards(tiny_model.MODEL, replicas(SQL, own))
    assert catalog.get("sql").adapter is None
    assert catalog.all_names() == ["sql", tiny_model.MODEL]
    assert len(own_records(caplog, logging.WARNING)) == 2


@pytest.mark.parametrize("order", [["tiny", "also"], ["also", "tiny"]])
@pytest.mark.parametrize(
    ("of_tiny", "of_also", "model"), [(SQL, SQL, "also"), ("sql", "sql", "also"), ("sql", SQL, "tiny")]
)
def test_of_two_models_that_claim_one_name_every_router_takes_the_same_and_says_so_once(
    order: list[str],
    of_tiny: Adapter | str,
    of_also: Adapter | str,
    model: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    catalog = ModelCatalog(tiny_model.SECRET)
    for name in order:
        catalog.add(tiny_model.card(name), tiny_model.bundle())
    for name in order * 2:
        catalog.set_cards(name, replicas(of_tiny if name == "tiny" else of_also, model=name))
    assert catalog.get("sql").card.name == model
    assert len(own_records(caplog, logging.WARNING)) == 1
    catalog.set_cards(model, [])  # while its replicas are away, no other model answers in its place
    assert catalog.get("sql").card.name == model
    catalog.set_cards(model, replicas(None, model=model))
    assert catalog.get("sql").card.name != model


def test_a_users_tag_tells_users_apart_and_not_who_they_are() -> None:
    catalog = catalog_with()
    tags = [catalog.user_tag(user) for user in ("ada", "bob", "\ud800", "x" * 10_000)]
    assert len(set(tags)) == len(tags)
    assert all(len(tag) == 8 for tag in tags)
    assert catalog_with(SQL).user_tag("ada") == tags[0]
    assert ModelCatalog(b"another secret of enough bytes").user_tag("ada") != tags[0]
    assert catalog.user_tag(None) == catalog.user_tag("") == NO_USER
