"""Folder: a folder for KV that is ours alone, and ours to erase.

Owns how our folder is recognised, and the lock that gives it to one replica at a time. Our folder has
`CACHEDIR.TAG` (the convention for backups) with a line of ours, the locked file `store.lock`, and a folder
per version of the format. Other content is never touched. No symbolic link is followed.

The marker is public, so owners and modes decide: a subfolder is used only if it belongs to the replica's user
and no other user can reach it. The folder itself may be root's, or a volume with wider access: others can
then remove its content, but cannot insert anything that would be used.
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from replicas.process.settings import SettingsError

MARKER = "CACHEDIR.TAG"
MARKER_TEXT = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"
    b"# KV of language models, written by Kvasir's replicas. Erase it while none of them uses it.\n"
)
LOCK = "store.lock"
SYSTEM_NAMES = frozenset({"lost+found"})
"""In a folder that is otherwise empty: a file system of its own."""

VERSION_FOLDER = re.compile(r"v[0-9]{1,4}")
TEMPORARY = re.compile(r"\.tmp-[0-9]{1,20}")

_TRIALS = (".tmp-0", ".tmp-1")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class Folder:
    """Makes the folder if it is not there, and locks it. `fd` is the folder's.

    Raises SettingsError if it cannot be used: one sentence that names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = _open(path)
        self._lock: int | None = None
        try:
            _keep_others_out(path, self.fd)
            self._lock = _lock(path, self.fd)
            _mark(path, self.fd)
        except SettingsError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise SettingsError(f"the KV folder {path} cannot be used: {error.strerror}") from error

    def version_folders(self) -> Iterator[tuple[str, int]]:
        """Name and descriptor of each, ours and other versions'; the descriptor is closed by the next."""
        for name in names_in(self.fd):
            if VERSION_FOLDER.fullmatch(name) and (fd := open_folder(self.fd, name)) is not None:
                try:
                    yield name, fd
                finally:
                    os.close(fd)

    def forget(self) -> None:
        """Take marker and lock away, as the last step of erasing it."""
        for name in (MARKER, LOCK):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_folder(parent: int, name: str, *, make: bool = False) -> int | None:
    """Open a folder in a folder; `make` creates a missing one with mode 0700. None if it is something else,
    missing, another user's or open to others. Raises OSError for errors that are not about this name."""
    try:
        return _if_ours_alone(os.open(name, _OPEN_FOLDER, dir_fd=parent))
    except FileNotFoundError:
        if not make:
            return None
    except (NotADirectoryError, PermissionError):
        return None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return None
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    return open_folder(parent, name)


def names_in(folder: int) -> list[str]:
    """Sorted. Threads may list one folder at once: each does it by a descriptor, and a place, of its own."""
    fd = os.open(".", _OPEN_FOLDER, dir_fd=folder)
    try:
        return sorted(os.listdir(fd))
    finally:
        os.close(fd)


def regular_file(parent: int, name: str) -> os.stat_result | None:
    """Return a file's status; None if there is none of this name, or something else."""
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _open(path: Path) -> int:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_symlink():
            raise SettingsError(f"the KV folder {path} is a symbolic link; name the folder itself")
        return os.open(path, _OPEN_FOLDER)
    except (FileExistsError, NotADirectoryError) as error:
        raise SettingsError(f"the KV folder {path} cannot be made: there is a file in its place") from error
    except OSError as error:
        raise SettingsError(f"the KV folder {path} cannot be opened: {error.strerror}") from error


def _if_ours_alone(fd: int) -> int | None:
    """Closes it if it is not."""
    found = os.fstat(fd)
    if found.st_uid == os.geteuid() and not found.st_mode & _OTHERS:
        return fd
    os.close(fd)
    return None


def _keep_others_out(path: Path, fd: int) -> None:
    """Set mode 0700 on an empty folder of our user. A mount point keeps its mode."""
    found, user = os.fstat(fd), os.geteuid()
    if found.st_uid not in (user, 0):
        raise SettingsError(
            f"the KV folder {path} belongs to user {found.st_uid}, and the replica runs as {user};"
            " name one of its own"
        )
    is_new = _is_new(path, fd)
    if _is_mount_point(fd, found.st_dev):
        return
    if is_new and found.st_uid == user:
        os.fchmod(fd, stat.S_IRWXU)
    elif found.st_mode & _OTHERS_WRITE:
        raise SettingsError(
            f"the KV folder {path} can be written to by others than its owner"
            f" (mode {stat.S_IMODE(found.st_mode):04o}); give it mode 0700"
        )


def _is_mount_point(fd: int, device: int) -> bool:
    try:
        return os.stat("..", dir_fd=fd).st_dev != device
    except PermissionError:
        return False


def _is_new(path: Path, fd: int) -> bool:
    """Whether the folder is new; its content tells. A lock alone was left by a process that died at start.

    Raises SettingsError if it is foreign.
    """
    names = set(names_in(fd)) - SYSTEM_NAMES
    if MARKER in names:
        if _is_marked(fd):
            return False
        raise SettingsError(f"the KV folder {path} is the cache of another program; name one of its own")
    foreign = sorted(name for name in names if name != LOCK and not TEMPORARY.fullmatch(name))
    if foreign:
        raise SettingsError(
            f"the KV folder {path} holds what Kvasir has not written, such as {foreign[0]!r};"
            " name an empty folder, or one that is not there yet"
        )
    return True


def _is_marked(fd: int) -> bool:
    try:
        marker = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
    except OSError:
        return False
    try:
        return os.read(marker, len(MARKER_TEXT) + 1) == MARKER_TEXT
    except OSError:
        return False
    finally:
        os.close(marker)


def _lock(path: Path, fd: int) -> int:
    """Return the locked file's descriptor. It is open in this process alone: no child inherits it."""
    try:
        lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=fd)
    except OSError as error:
        raise SettingsError(f"the KV folder {path} cannot be written to: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise SettingsError(
            f"the KV folder {path} is in use by another replica; give each replica a folder of its own"
        ) from error
    except OSError as error:
        os.close(lock)
        raise SettingsError(
            f"the KV folder {path} is on a file system without locks ({error.strerror}); use a local one"
        ) from error
    if os.fstat(lock).st_nlink == 0:  # erased by its last owner between our opening and locking it
        os.close(lock)
        return _lock(path, fd)
    return lock


def _mark(path: Path, fd: int) -> None:
    """Write the marker, or if it exists a file that is removed again, to check that files can be written and
    renamed here. A marked folder may be full: its content can be read."""
    is_marked = _is_marked(fd)
    try:
        for name in _TRIALS:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
        trial = os.open(_TRIALS[0], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=fd)
        try:
            os.write(trial, MARKER_TEXT)
            if not is_marked:
                os.fsync(trial)
        finally:
            os.close(trial)
        os.rename(_TRIALS[0], _TRIALS[1] if is_marked else MARKER, src_dir_fd=fd, dst_dir_fd=fd)
        if is_marked:
            os.unlink(_TRIALS[1], dir_fd=fd)
    except OSError as error:
        if error.errno in _NO_ROOM and is_marked:
            return
        raise SettingsError(
            f"in the KV folder {path} no file can be written and renamed: {error.strerror}"
        ) from error
