"""What routers keep of named caches is for routers of the same secret, and for its own place, alone."""

import pytest

from replicas.protocol.cluster_secret import ClusterSecret
from router.shared.sealing import OVERHEAD_BYTES, NotOurs, Seal

OLD, NEW = b"the old secret....", b"the new secret...."
PLAIN = "What nobody else may read. ☂".encode()


def test_what_was_sealed_is_opened_at_its_place_and_reads_like_noise() -> None:
    seal = Seal(ClusterSecret(OLD))
    sealed = seal.seal("here", PLAIN)
    assert Seal(ClusterSecret(OLD)).open("here", sealed) == PLAIN
    assert len(sealed) == len(PLAIN) + OVERHEAD_BYTES and b"nobody" not in sealed
    assert seal.seal("here", PLAIN) != sealed
    with pytest.raises(NotOurs):
        seal.open("there", sealed)


def test_no_bit_may_be_another() -> None:
    seal = Seal(ClusterSecret(OLD))
    sealed = seal.seal("here", PLAIN)
    for position in range(len(sealed)):
        changed = bytearray(sealed)
        changed[position] ^= 0x10
        with pytest.raises(NotOurs):
            seal.open("here", bytes(changed))
    for length in range(len(sealed)):
        with pytest.raises(NotOurs):
            seal.open("here", sealed[:length])


def test_a_secret_is_changed_without_losing_what_was_sealed() -> None:
    before = Seal(ClusterSecret(OLD)).seal("here", PLAIN)
    during = Seal(ClusterSecret(NEW, (OLD,)))
    assert during.open("here", before) == PLAIN
    after = during.seal("here", PLAIN)
    assert Seal(ClusterSecret(NEW)).open("here", after) == PLAIN
    for seal, sealed in ((Seal(ClusterSecret(NEW)), before), (Seal(ClusterSecret(OLD)), after)):
        with pytest.raises(NotOurs):
            seal.open("here", sealed)
