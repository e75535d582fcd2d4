"""The cluster secret: where it is read from, and the keys that are made of it."""

import dataclasses
import random
from pathlib import Path

import pytest

from replicas.config import ReplicaConfig
from replicas.openings import open_secret
from replicas.process.secret_file import read_secret
from replicas.process.settings import SettingsError, build
from replicas.protocol.cluster_secret import ClusterSecret, Purpose, derive
from router.assembly import Router
from router.config import RouterConfig

OLD, NEW = b"\xab" * 16, b"\xcd" * 32


def read(path: Path, content: bytes) -> ClusterSecret | None:
    path.write_bytes(content)
    return read_secret(None, str(path))


def test_a_secret_is_hex_or_the_bytes_of_a_file(tmp_path: Path) -> None:
    assert read(tmp_path / "secret", b"ab" * 16 + b"\n") == ClusterSecret(OLD)
    assert read(tmp_path / "secret", b"\x00\xff" * 8) == ClusterSecret(b"\x00\xff" * 8)
    assert read_secret("cd" * 32, None) == ClusterSecret(NEW)
    assert read_secret(None, None) is None


def test_a_secret_file_may_lie_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    read(tmp_path / "secret", b"ab" * 16)
    assert read_secret(None, "~/secret") == ClusterSecret(OLD)


def test_of_several_lines_the_first_is_in_force_and_all_are_believed(tmp_path: Path) -> None:
    secret = read(tmp_path / "secret", f"{NEW.hex()}\n\n{OLD.hex()}\n".encode())
    assert secret == ClusterSecret(NEW, (OLD,))
    assert secret.key(Purpose.LEASES) == derive(NEW, Purpose.LEASES)
    assert secret.keys(Purpose.LEASES) == (derive(NEW, Purpose.LEASES), derive(OLD, Purpose.LEASES))
    assert secret.check_value == ClusterSecret(NEW).check_value != ClusterSecret(OLD).check_value


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "holds 0 bytes; it needs 16 to 64"),
        (b"short", "holds 5 bytes"),
        (b"ab" * 15, "holds 15 bytes"),
        (b"ab" * 65, "holds 65 bytes"),
        (b"ab" * 16 + b"\n" + b"cd" * 8, "holds 8 bytes"),
    ],
)
def test_a_secret_of_another_length_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    with pytest.raises(SettingsError, match=f"the secret file .* {sentence}"):
        read(tmp_path / "secret", content)


def test_a_setting_that_is_no_hex_and_a_file_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="setting secret must be hex digits"):
        read_secret("xyz", None)
    with pytest.raises(SettingsError, match="cannot read the secret file"):
        read_secret(None, str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("mode", "is_open"),
    [(0o600, False), (0o400, False), (0o440, False), (0o644, True), (0o604, True), (0o620, True)],
)
def test_router_and_replica_warn_of_a_secret_that_others_may_read_or_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_open: bool
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"ab" * 16)
    path.chmod(mode)
    for start in (
        lambda: open_secret(ReplicaConfig(secret_file=str(path))),
        lambda: open_secret(
            ReplicaConfig(engine="openai", engine_url="http://a:1", engine_key_file=str(path))
        ),
        lambda: Router(RouterConfig(secret_file=str(path)), rng=random.Random(0)),
    ):
        caplog.clear()
        start()
        said = [record.message for record in caplog.records if str(path) in record.message]
        sentence = f"{path} has mode {mode:04o}: others may read or change it; chmod 600"
        assert said == ([sentence] if is_open else [])


def test_every_purpose_and_every_secret_has_a_key_of_its_own() -> None:
    keys = {derive(secret, purpose) for secret in (OLD, NEW) for purpose in Purpose}
    assert len(keys) == 2 * len(Purpose)
    assert all(len(key) == 32 for key in keys)


@pytest.mark.parametrize("config_class", [ReplicaConfig, RouterConfig])
def test_no_text_of_a_configuration_shows_the_secret(config_class: type) -> None:
    config = build(config_class, {"secret": "cd" * 20})
    assert "cdcd" not in repr(config) + str(config) + repr(read_secret(config.secret, None))
    with pytest.raises(SettingsError, match="cannot be used together"):
        dataclasses.replace(config, secret_file="secret")
