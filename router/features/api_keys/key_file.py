"""KeyFile: a file of tenants and keys, read at the start and followed when it changes.

Owns the detection of changes: by inode, size and times, on which two looks in a row must agree, so that no
half-written file is read. Symlinks are followed at each look: Kubernetes swaps one when a Secret changes. A
wrong or missing file leaves the old keys in force.
"""

import asyncio
import logging
import os
from pathlib import Path
from typing import NamedTuple

from replicas.process.secret_file import open_file_complaint
from replicas.process.settings import SettingsError
from router.features.api_keys.key_document import MAX_BYTES, BadKeys, read_document
from router.features.api_keys.keys_in_force import KeySet, KeysInForce, key_set

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0


class _FileVersion(NamedTuple):
    """Version of a file, by metadata alone."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


class _FileLook(NamedTuple):
    """`found` is new content; `is_newest` says that the last content read is still current."""

    found: KeySet | None
    is_newest: bool


class KeyFile:
    def __init__(self, path: str, keys: KeysInForce, *, look_seconds: float = LOOK_SECONDS) -> None:
        """Read the keys. Raises SettingsError if the file is not valid at the start."""
        self._path = Path(path).expanduser()
        self._keys = keys
        self._look_seconds = look_seconds
        self._refusal: BadKeys | None = None
        self._has_warned = False
        try:
            self._read = self._seen = _version(self._path.stat())
            keys.put(self._read_file())
        except (OSError, BadKeys) as error:
            raise SettingsError(self._complaint(error)) from error

    async def follow(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._look_seconds)
            await self._follow_once()

    async def _follow_once(self) -> None:
        try:
            look = await asyncio.to_thread(self._look)
        except BadKeys as error:
            self._keys.refuse(self._complaint(error))
        except OSError as error:
            self._keys.miss(self._complaint(error))
        else:
            if look.found is not None:
                old = self._keys.put(look.found)
                logger.info("the keys in %s are in force keys=%d", self._path, len(look.found.keyring))
                await asyncio.to_thread(old.keyring.let_go)
            elif look.is_newest:
                self._keys.confirm()

    def _look(self) -> _FileLook:
        """In a thread. Raises BadKeys or OSError."""
        now = _version(self._path.stat())
        before, self._seen = self._seen, now
        if now == self._read:
            if self._refusal is not None:
                raise self._refusal
            return _FileLook(None, is_newest=True)
        if now != before:
            return _FileLook(None, is_newest=False)
        try:
            found = self._read_file()
        except BadKeys as error:
            self._read, self._refusal = now, error
            raise
        self._read, self._refusal = now, None
        return _FileLook(found, is_newest=True)

    def _read_file(self) -> KeySet:
        """Raises BadKeys or OSError."""
        with self._path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_BYTES + 1)
        found = key_set(read_document(content))
        self._warn(mode)
        return found

    def _warn(self, mode: int) -> None:
        """Once, until it is right again."""
        complaint = open_file_complaint(self._path, mode)
        if complaint is not None and not self._has_warned:
            logger.warning(complaint)
        self._has_warned = complaint is not None

    def _complaint(self, error: OSError | BadKeys) -> str:
        if isinstance(error, OSError):
            return f"the file of keys {self._path} cannot be read: {error.strerror or error}"
        return f"the file of keys {self._path} is wrong: {error}"


def _version(found: os.stat_result) -> _FileVersion:
    return _FileVersion(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
