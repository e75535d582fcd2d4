"""Where a process has the cluster secret from: a setting, or better a file, which no process list shows.

Owns the reading: hex digits or bytes, one secret or several. What is made of them, `cluster_secret.py` says.
"""

from pathlib import Path

from replicas.process.settings import SettingsError
from replicas.protocol.cluster_secret import MAX_SECRET_BYTES, MIN_SECRET_BYTES, ClusterSecret


def read_secret(secret: str | None, secret_file: str | None) -> ClusterSecret | None:
    """What the settings `secret` and `secret_file` say, None if neither is set; a file may begin with `~`.

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
    """From hex digits, one secret in each line, the first of which is in force. Raises SettingsError with a
    sentence that begins with `what`."""
    try:
        found = [bytes.fromhex(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise SettingsError(f"{what} must be hex digits") from error
    return _checked(found or [b""], what)


def _secret_from_bytes(content: bytes, what: str) -> ClusterSecret:
    """From a file's content: hex digits as above, or else one secret, as it is. Raises SettingsError."""
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
