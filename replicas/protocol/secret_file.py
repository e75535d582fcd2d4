"""Where a process has the cluster secret from: a setting, or better a file, which no process list shows.

Owns the reading. What is in it, and what is made of it, `cluster_secret.py` knows.
"""

from pathlib import Path

from replicas.protocol.cluster_secret import ClusterSecret, secret_from_bytes, secret_from_text
from replicas.protocol.settings import SettingsError


def read_secret(secret: str | None, secret_file: str | None) -> ClusterSecret | None:
    """What the settings `secret` and `secret_file` say, None if neither is set; a file may begin with `~`.

    Raises SettingsError.
    """
    if secret is not None:
        return secret_from_text(secret, "setting secret")
    if secret_file is None:
        return None
    try:
        content = Path(secret_file).expanduser().read_bytes()
    except OSError as error:
        raise SettingsError(f"cannot read the secret file {secret_file}: {error.strerror}") from error
    return secret_from_bytes(content, f"the secret file {secret_file}")
