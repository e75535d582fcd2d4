"""RedisKeys: tenants and keys in Redis, sealed; routers follow them, replicas may not read them.

Owns the format: one text, AES-256-GCM over a version number and the document. The number only goes up, and a
router refuses a document older than one it has seen. So a writer to Redis without the secret cannot bring
back a revoked key, as long as one router has run since. While Redis is away or has no keys, the last ones
stay in force.
"""

import asyncio
import logging
from typing import NamedTuple

from redis.asyncio import Redis
from redis.exceptions import WatchError

from replicas.process.cancellation import raise_if_cancelled
from replicas.process.plain_redis import plain_redis
from replicas.protocol.cluster_secret import ClusterSecret, Purpose
from router.features.api_keys.key_document import BadKeys, read_document, write_json
from router.features.api_keys.key_record import NO_KEYS, KeyDocument
from router.features.api_keys.keys_in_force import KeySet, KeysInForce, key_set
from router.shared.redis_health import REDIS_FAILURES
from router.shared.sealing import KEY_ID_BYTES, NONCE_BYTES, VERSION, NotOurs, Seal

logger = logging.getLogger(__name__)

DOCUMENT_KEY = "kvasir-keys:document"
POLL_SECONDS = 2.0
LOOK_SECONDS = 2.0
READ_SECONDS = 20.0
MAX_TRIES = 64

_HEAD_BYTES = len(VERSION) + KEY_ID_BYTES + NONCE_BYTES
"""The head differs with every write, so it is enough to see that the document is the same."""
_NUMBER_BYTES = 8


class Numbered(NamedTuple):
    number: int
    document: KeyDocument


def seal_document(seal: Seal, numbered: Numbered) -> bytes:
    plain = numbered.number.to_bytes(_NUMBER_BYTES, "big") + write_json(numbered.document)
    return seal.seal(DOCUMENT_KEY, plain)


def open_document(seal: Seal, sealed: bytes) -> Numbered:
    """Raises NotOurs or BadKeys."""
    plain = seal.open(DOCUMENT_KEY, sealed)
    return Numbered(int.from_bytes(plain[:_NUMBER_BYTES], "big"), read_document(plain[_NUMBER_BYTES:]))


class RedisKeys:
    """Until it has found keys, every request is refused."""

    def __init__(
        self, redis_url: str, secret: ClusterSecret, keys: KeysInForce, *, poll_seconds: float = POLL_SECONDS
    ) -> None:
        self._redis_url = redis_url
        self._secret = secret
        self._keys = keys
        self._poll_seconds = poll_seconds
        self._head: bytes | None = None
        self._refusal: str | None = None
        self._newest = 0

    async def follow(self) -> None:
        """Until cancelled."""
        seal = await asyncio.to_thread(Seal, self._secret, Purpose.API_KEYS)
        async with plain_redis(self._redis_url) as redis:
            while True:
                raise_if_cancelled()
                try:
                    await self._look(redis, seal)
                except REDIS_FAILURES as error:
                    self._keys.miss(f"the keys in Redis cannot be read: {type(error).__name__}")
                await asyncio.sleep(self._poll_seconds)

    async def _look(self, redis: "Redis", seal: Seal) -> None:
        async with asyncio.timeout(LOOK_SECONDS):
            head = await redis.getrange(DOCUMENT_KEY, 0, _HEAD_BYTES - 1)
        if not head:
            self._keys.miss("there are no keys in Redis")
        elif head != self._head:
            async with asyncio.timeout(READ_SECONDS):
                sealed = await _document(redis)
            if sealed is not None:
                await self._take(seal, sealed)
        elif self._refusal is not None:
            self._keys.refuse(self._refusal)
        else:
            self._keys.confirm()

    async def _take(self, seal: Seal, sealed: bytes) -> None:
        self._head = sealed[:_HEAD_BYTES]
        try:
            number, found = await asyncio.to_thread(_opened, seal, sealed)
        except (NotOurs, BadKeys) as error:
            self._refusal = f"the keys in Redis are wrong: {error}"
        else:
            is_older = number < self._newest
            self._refusal = "the keys in Redis are older than those in force" if is_older else None
        if self._refusal is not None:
            self._keys.refuse(self._refusal)
            return
        self._newest = number
        old = self._keys.put(found)
        logger.info("the keys in Redis are in force keys=%d", len(found.keyring))
        await asyncio.to_thread(old.keyring.let_go)


async def _document(redis: "Redis") -> bytes | None:
    found = await redis.get(DOCUMENT_KEY)
    assert not isinstance(found, str), "responses are not decoded"
    return found


def _opened(seal: Seal, sealed: bytes) -> tuple[int, KeySet]:
    number, document = open_document(seal, sealed)
    return number, key_set(document)


async def read_keys(redis_url: str, seal: Seal) -> Numbered | None:
    """Return the document in Redis. Raises RedisError, OSError, NotOurs or BadKeys."""
    async with plain_redis(redis_url) as redis:
        sealed = await _document(redis)
    return None if sealed is None else open_document(seal, sealed)


async def replace_keys(redis_url: str, seal: Seal, old: Numbered | None, new: Numbered) -> bool:
    """Write `new`, unless Redis no longer has `old`; returns whether it did. Raises as `read_keys` does."""
    async with plain_redis(redis_url) as redis, redis.pipeline(transaction=True) as pipeline:
        await pipeline.watch(DOCUMENT_KEY)
        sealed = await _document(pipeline)
        found = None if sealed is None else open_document(seal, sealed).number
        if found != (None if old is None else old.number):
            return False
        pipeline.multi()  # type: ignore[no-untyped-call]
        pipeline.set(DOCUMENT_KEY, seal_document(seal, new))
        try:
            await pipeline.execute()
        except WatchError:
            return False
    return True


def next_number(old: Numbered | None, now_ms: int) -> int:
    """Above the last one, and above one that Redis has lost: at least the current time."""
    return max(now_ms, 0 if old is None else old.number + 1)


def document_in(found: Numbered | None) -> KeyDocument:
    return NO_KEYS if found is None else found.document
