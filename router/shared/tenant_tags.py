"""TenantTags: what stands for a tenant in the names of Redis' keys, so that listing them tells no name.

Owns the digest: BLAKE2b (RFC 7693), keyed with a key made of the cluster secret. Without a secret it is not
keyed, and who guesses a name can check it. Pure.
"""

import hashlib

from replicas.protocol.cluster_secret import ClusterSecret, Purpose

TAG_BYTES = 16


class TenantTags:
    """Equal for all routers that have the same secret in force."""

    def __init__(self, secret: ClusterSecret | None) -> None:
        self._keys = (b"",) if secret is None else secret.keys(Purpose.TENANT_TAGS)

    def of(self, tenant: str) -> str:
        """Under the secret in force, for what is written."""
        return _tag(self._keys[0], tenant)

    def all_of(self, tenant: str) -> tuple[str, ...]:
        """Under every secret that is accepted, the one in force first, for what is read."""
        return tuple(_tag(key, tenant) for key in self._keys)


def _tag(key: bytes, tenant: str) -> str:
    digest = hashlib.blake2b(tenant.encode(), key=key, digest_size=TAG_BYTES, person=b"kvasir-tenanttag")
    return digest.hexdigest()
