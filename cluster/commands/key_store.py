"""Storage of `kvasir keys` for tenants and keys: a file, or Redis.

Guarantees that no change is lost: of two concurrent commands the second waits, and readers see a whole
document, old or new.
"""

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from redis.exceptions import RedisError

from cluster.errors import ClusterError
from replicas.process.secret_file import read_secret
from replicas.process.settings import SettingsError, without_password
from replicas.protocol.cluster_secret import Purpose
from router.features.api_keys.key_document import BadKeys, read_document, write_json, write_yaml
from router.features.api_keys.key_record import NO_KEYS, KeyDocument
from router.features.api_keys.redis_keys import (
    MAX_TRIES,
    Numbered,
    document_in,
    next_number,
    read_keys,
    replace_keys,
)
from router.shared.sealing import NotOurs, Seal

REDIS_SECONDS = 30.0

Answer = TypeVar("Answer")
Change = Callable[[KeyDocument], KeyDocument]


class KeyStore(Protocol):
    @property
    def place(self) -> str:
        """Name the place in a sentence."""

    def read(self) -> KeyDocument:
        """Read the document. Raises ClusterError."""

    def change(self, change: Change, *, may_begin: bool = False) -> KeyDocument:
        """Apply `change` and return the new document. `change` may run more than once, and may raise. With
        `may_begin`, a missing document starts empty. Raises ClusterError."""


class KeyFileStore:
    """Keys in a file of mode 0600. Comments in it do not survive a change."""

    def __init__(self, path: Path) -> None:
        self._path = path.expanduser()

    @property
    def place(self) -> str:
        return str(self._path)

    def read(self) -> KeyDocument:
        return self._read()[0]

    def change(self, change: Change, *, may_begin: bool = False) -> KeyDocument:
        try:
            path = self._path.resolve()  # not a symlink is replaced, but what it leads to
            with _locked(path.parent):
                old, is_json = self._read(may_begin=may_begin)
                new = change(old)
                _replace(path, write_json(new) if is_json else write_yaml(new))
        except OSError as error:
            raise ClusterError(f"cannot write {self._path}: {error.strerror}") from error
        except BadKeys as error:
            raise ClusterError(f"cannot write {self._path}: {error}") from error
        return new

    def _read(self, *, may_begin: bool = False) -> tuple[KeyDocument, bool]:
        """Return the document, and whether it is JSON."""
        try:
            content = self._path.read_bytes()
            return read_document(content), content.lstrip().startswith(b"{")
        except FileNotFoundError as error:
            if may_begin:
                return NO_KEYS, self._path.suffix == ".json"
            message = f"there is no file {self._path}; `kvasir keys create --file` begins one"
            raise ClusterError(message) from error
        except OSError as error:
            raise ClusterError(f"cannot read {self._path}: {error.strerror}") from error
        except BadKeys as error:
            raise ClusterError(f"{self._path} is wrong: {error}") from error


class KeyRedisStore:
    """Keys in Redis, sealed under the cluster secret, for routers with `keys_in_redis`. Raises
    ClusterError."""

    def __init__(self, redis_url: str, secret_file: str) -> None:
        try:
            secret = read_secret(None, secret_file)
        except SettingsError as error:
            raise ClusterError(str(error)) from error
        assert secret is not None
        self._seal = Seal(secret, Purpose.API_KEYS)
        self._redis_url = redis_url
        self.place = without_password(redis_url)

    def read(self) -> KeyDocument:
        found = self._asked(lambda: read_keys(self._redis_url, self._seal))
        if found is None:
            raise ClusterError(f"there are no keys in {self.place}; `kvasir keys create` makes the first")
        return found.document

    def change(self, change: Change, *, may_begin: bool = False) -> KeyDocument:
        for _ in range(MAX_TRIES):
            old = self._asked(lambda: read_keys(self._redis_url, self._seal))
            if old is None and not may_begin:
                self.read()
            new = Numbered(next_number(old, time.time_ns() // 10**6), change(document_in(old)))
            if self._asked(partial(replace_keys, self._redis_url, self._seal, old, new)):
                return new.document
        raise ClusterError(f"the keys in {self.place} are being changed too often at once")

    def _asked(self, ask: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        async def in_time() -> Answer:
            async with asyncio.timeout(REDIS_SECONDS):
                return await ask()

        try:
            return asyncio.run(in_time())
        except (NotOurs, BadKeys) as error:
            raise ClusterError(f"the keys in {self.place} are wrong: {error}") from error
        except (RedisError, OSError, ValueError) as error:
            raise ClusterError(f"{self.place} does not answer: {type(error).__name__}") from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder; the file itself is replaced by each change."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, content: bytes) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
