"""ProgramName: what a request says of the program that it is a turn of.

Plain data. Nothing in it is trusted beyond its tenant.
"""

import hashlib

import msgspec

KEY_BYTES = 16


class ProgramName(msgspec.Struct, frozen=True):
    """`source` is the kind of client whose fields were read, and `field` the one that named the session.

    Agents of one session are programs of their own; the main one has an empty `agent`. `parent` is the agent
    that began this one, "" for the session's main one, and None for a main one itself. Where subagents have
    sessions of their own, `parent_session` is that of the parent.
    """

    source: str
    field: str
    session: str
    agent: str = ""
    parent: str | None = None
    parent_session: str | None = None
    is_side: bool = False
    """A call beside the turns: a title, a compaction, a count of tokens."""
    salt: str = ""
    """A digest of the client's cache_salt: what it keeps apart shares no KV."""

    def key(self, model: str, tenant: str) -> bytes:
        """Name the program in books: never across tenants or models."""
        return _key(model, tenant, self.source, self.salt, self.session, self.agent)

    def parent_key(self, model: str, tenant: str) -> bytes | None:
        if self.parent is None:
            return None
        session = self.session if self.parent_session is None else self.parent_session
        return _key(model, tenant, self.source, self.salt, session, self.parent)


def _key(*parts: str) -> bytes:
    hashed = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        hashed.update(len(encoded).to_bytes(4, "big") + encoded)
    return hashed.digest()
