"""Reads the cluster secret: from a setting, or better a file, which no process list shows.

Owns the parsing (hex digits or bytes, one secret or several) and the check of a file's mode.
`cluster_secret.py` derives keys from secrets.
"""

import stat
from pathlib import Path

from replicas.process.settings import SettingsError
from replicas.protocol.cluster_secret import MAX_SECRET_BYTES, MIN_SECRET_BYTES, ClusterSecret

_OTHERS = stat.S_IWGRP | stat.S_IRWXO
"""Mode bits that only the owner should have. The group may read, as pods read Secrets."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def open_file_complaint(path: Path, mode: int, *, is_secret: bool = True) -> str | None:
    """Return a warning about a file with this mode; None if others cannot change it, nor read it if it is
    secret."""
    if not mode & (_OTHERS if is_secret else _OTHERS_WRITE):
        return None
    what = "others may read or change it; chmod 600" if is_secret else "others may change it; chmod go-w"
    return f"{path} has mode {stat.S_IMODE(mode):04o}: {what}"


def open_secret_complaint(secret_file: str | None) -> str | None:
    """Check the mode of a setting's file. None if the file is missing, which its reader reports."""
    if secret_file is None:
        return None
    path = Path(secret_file).expanduser()
    try:
        return open_file_complaint(path, path.stat().st_mode)
    except OSError:
        return None


def read_secret(secret: str | None, secret_file: str | None) -> ClusterSecret | None:
    """Read the secret from the settings `secret` and `secret_file`; None if neither is set. A file may begin
    with `~`.

    Raises SettingsError.
    """
    if secret is not None:
        return _secret_from_text(secret, "setting secret")
    if secret_file is None:
        return None
    try:
        content = Path(secret_file).expanduser().read_bytes()
    except OSError as error:
        raise SettingsError(f"cannot read the secret file {secret_file}: {error.strerror}") from error
    return _secret_from_bytes(content, f"the secret file {secret_file}")


def _secret_from_text(text: str, what: str) -> ClusterSecret:
    """Parse hex digits, one secret per line, the first in force. Raises SettingsError with a sentence that
    begins with `what`."""
    try:
        found = [bytes.fromhex(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise SettingsError(f"{what} must be hex digits") from error
    return _checked(found or [b""], what)


def _secret_from_bytes(content: bytes, what: str) -> ClusterSecret:
    """Parse a file's content: hex digits as above, or else one binary secret. Raises SettingsError."""
    try:
        text = content.decode("ascii")
        bytes.fromhex(text)
    except ValueError:
        return _checked([content], what)
    return _secret_from_text(text, what)


def _checked(found: list[bytes], what: str) -> ClusterSecret:
    for secret in found:
        if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
            raise SettingsError(
                f"{what} holds {len(secret)} bytes; it needs {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}"
            )
    return ClusterSecret(found[0], tuple(found[1:]))
