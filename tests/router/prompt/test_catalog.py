"""ModelCatalog: names, replacement, namespaces."""

import dataclasses

import pytest

from replicas.protocol.blocks import Namespace, namespace_root
from router.errors import NoReplicaAvailable, UnknownModel
from router.prompt.catalog import ModelCatalog
from tests.router import tiny_model


def test_an_unknown_name_is_refused_by_that_name() -> None:
    catalog = ModelCatalog(tiny_model.SECRET)
    catalog.add(tiny_model.card(), tiny_model.bundle())
    with pytest.raises(UnknownModel, match="nobody"):
        catalog.get("nobody")


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
