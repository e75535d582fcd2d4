"""PEM files: what is refused with which sentence, and what a renewal changes."""

import logging
import subprocess
from pathlib import Path

import pytest

from replicas.protocol.settings import SettingsError
from replicas.protocol.tls import FollowedFiles, TlsFiles, explained, read_pems
from tests.certificates import Authority, copied


def test_files_that_belong_together_are_read_as_they_are(ca: Authority) -> None:
    files = ca.replica().trusting(ca)
    pems = read_pems(files)
    assert files.certificate and files.key and files.ca
    assert pems.certificate == Path(files.certificate).read_bytes()
    assert pems.key == Path(files.key).read_bytes()
    assert pems.ca == Path(files.ca).read_bytes()


def test_a_chain_and_a_bundle_of_authorities_are_fine(
    ca: Authority, other_ca: Authority, tmp_path: Path
) -> None:
    files = copied(ca.replica().trusting(ca), tmp_path / "tls")
    for name in ("tls.crt", "ca.crt"):
        path = tmp_path / "tls" / name
        path.write_bytes(path.read_bytes() + Path(other_ca.certificate).read_bytes())
    assert read_pems(files).certificate


def test_a_key_shows_in_no_text_of_what_was_read(ca: Authority) -> None:
    assert "PRIVATE KEY" not in repr(read_pems(ca.replica().trusting(ca)))


@pytest.mark.parametrize("part", ["certificate", "key", "ca"])
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot read {path}: No such file or directory"),
        (b"", "{path} holds no "),
        (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "{path} holds no "),
        (b"\xff\xfe", "{path} holds no "),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_its_name(
    ca: Authority, tmp_path: Path, part: str, content: bytes | None, sentence: str
) -> None:
    files = copied(ca.replica().trusting(ca), tmp_path / "tls")
    path = Path(str(getattr(files, part)))
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError) as refusal:
        read_pems(files)
    assert str(refusal.value).startswith(sentence.format(path=path))
    assert "\n" not in str(refusal.value)


def test_a_key_of_another_certificate_is_refused(ca: Authority) -> None:
    one, two = ca.replica(), ca.replica()
    with pytest.raises(SettingsError) as refusal:
        read_pems(TlsFiles(one.certificate, two.key, None))
    assert (
        str(refusal.value) == f"the key in {two.key} does not belong to the certificate in {one.certificate}"
    )


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(ca: Authority, tmp_path: Path) -> None:
    pair = ca.replica()
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", pair.key, "-aes128", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(SettingsError, match="holds no key in PEM form without a password"):
        read_pems(TlsFiles(pair.certificate, str(locked), None))


def test_a_renewal_is_told_once(ca: Authority, tmp_path: Path) -> None:
    followed = FollowedFiles(copied(ca.replica().trusting(ca), tmp_path / "tls"))
    assert followed.renewed() is None
    copied(ca.replica().trusting(ca), tmp_path / "tls")
    renewed = followed.renewed()
    assert renewed is not None and renewed == followed.pems
    assert followed.renewed() is None


def test_broken_files_leave_those_before_in_force_are_logged_once_and_whole_ones_count_again(
    ca: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = copied(ca.replica().trusting(ca), tmp_path / "tls")
    followed = FollowedFiles(files)
    before = followed.pems
    assert files.key is not None
    Path(files.key).write_text("half of a ke")
    for _ in range(3):
        assert followed.renewed() is None
    assert followed.pems == before
    (complaint,) = [item for item in caplog.records if item.levelno == logging.ERROR]
    assert files.key in complaint.getMessage()
    copied(ca.replica().trusting(ca), tmp_path / "tls")
    assert followed.renewed() is not None
    assert followed.pems != before


def test_what_is_no_matter_of_tls_is_not_explained_by_it() -> None:
    refused = (
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to "
        "remote host: Connection refused"
    )
    assert explained(refused, None) is None
    assert explained("Socket closed", None) is None, "it was connected before"
