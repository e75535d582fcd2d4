"""Files of TLS: what is read, refused, renewed, and how long it holds."""

import asyncio
import logging
import ssl
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from replicas.process.settings import SettingsError
from replicas.process.tls import FollowedFiles, RouterTls, TlsFiles, explained, read_pems
from replicas.process.validity import Validity, validities
from tests.certificates import Authority, copied, self_signed
from tests.own_log import own_records
from tests.tools import needed_tool


def test_files_that_belong_together_are_read_as_they_are(ca: Authority) -> None:
    files = ca.replica().trusting(ca)
    pems = read_pems(files, time.time())
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
    assert read_pems(files, time.time()).certificate


def test_a_key_shows_in_no_text_of_what_was_read(ca: Authority) -> None:
    assert "PRIVATE KEY" not in repr(read_pems(ca.replica().trusting(ca), time.time()))


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
        read_pems(files, time.time())
    assert str(refusal.value).startswith(sentence.format(path=path))
    assert "\n" not in str(refusal.value)


def test_a_key_of_another_certificate_is_refused(ca: Authority) -> None:
    one, two = ca.replica(), ca.replica()
    with pytest.raises(SettingsError) as refusal:
        read_pems(TlsFiles(one.certificate, two.key, None), time.time())
    assert (
        str(refusal.value) == f"the key in {two.key} does not belong to the certificate in {one.certificate}"
    )


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(ca: Authority, tmp_path: Path) -> None:
    pair = ca.replica()
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", pair.key, "-aes128", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(SettingsError, match="holds no key in PEM form without a password"):
        read_pems(TlsFiles(pair.certificate, str(locked), None), time.time())


NOW = datetime.now(UTC).replace(microsecond=0)
DAY = timedelta(days=1)


@pytest.mark.parametrize(
    ("begins", "ends", "sentence"),
    [
        (NOW - 9 * DAY, NOW - 2 * DAY, f"expired on {NOW - 2 * DAY:%Y-%m-%d %H:%M:%S} UTC"),
        (NOW + DAY, NOW + 9 * DAY, f"is not valid before {NOW + DAY:%Y-%m-%d %H:%M:%S} UTC"),
    ],
    ids=["expired", "not valid yet"],
)
def test_a_certificate_and_a_ca_whose_time_is_not_now_are_refused_with_the_date(
    ca: Authority, tmp_path: Path, begins: datetime, ends: datetime, sentence: str
) -> None:
    pair, good = self_signed(tmp_path, begins, ends), ca.replica()
    for files in (
        TlsFiles(pair.certificate, pair.key, ca.certificate),
        TlsFiles(good.certificate, good.key, pair.certificate),
        TlsFiles(None, None, pair.certificate),
    ):
        with pytest.raises(SettingsError) as refusal:
            FollowedFiles(files)
        assert str(refusal.value) == f"the certificate in {pair.certificate} {sentence}"


def test_of_several_authorities_one_that_is_valid_will_do(ca: Authority, tmp_path: Path) -> None:
    old = self_signed(tmp_path, NOW - 9 * DAY, NOW - DAY)
    both = tmp_path / "both.crt"
    both.write_bytes(Path(old.certificate).read_bytes() + Path(ca.certificate).read_bytes())
    (ends,) = FollowedFiles(TlsFiles(None, None, str(both))).pems.ends.values()
    assert ends > NOW.timestamp()


def test_an_expired_renewal_leaves_those_before_in_force_and_the_end_is_that_of_what_is_in_force(
    ca: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = copied(ca.replica().trusting(ca), tmp_path / "tls")
    followed = FollowedFiles(files)
    before = followed.current().ends
    assert set(before) == {"certificate", "ca"}
    old = self_signed(tmp_path / "old", NOW - 9 * DAY, NOW - DAY)
    copied(TlsFiles(old.certificate, old.key, ca.certificate), tmp_path / "tls")
    assert followed.current().ends == before
    assert f"the certificate in {files.certificate} expired on " in caplog.text
    new = self_signed(tmp_path / "new", NOW - 9 * DAY, NOW + 77 * DAY)
    copied(TlsFiles(new.certificate, new.key, ca.certificate), tmp_path / "tls")
    assert followed.current().ends == before | {"certificate": (NOW + 77 * DAY).timestamp()}


def test_that_the_end_is_near_is_said_once_of_each_file_at_the_start_and_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    near = self_signed(tmp_path / "near", NOW - 95 * DAY, NOW + 5 * DAY)
    far = self_signed(tmp_path / "far", NOW - 75 * DAY, NOW + 25 * DAY)
    now = NOW
    followed = FollowedFiles(
        TlsFiles(far.certificate, far.key, near.certificate), clock=lambda: now.timestamp()
    )

    def warned() -> list[str]:
        return [item.getMessage() for item in own_records(caplog, logging.WARNING)]

    should = "; it should have been renewed"
    of_near = f"{near.certificate} expires on {NOW + 5 * DAY:%Y-%m-%d %H:%M:%S} UTC{should}"
    followed.current()
    assert warned() == [of_near]
    now += 20 * DAY
    followed.current()
    followed.current()
    assert warned() == [
        of_near,
        f"{far.certificate} expires on {NOW + 25 * DAY:%Y-%m-%d %H:%M:%S} UTC{should}",
    ]


def test_what_is_renewed_is_in_force(ca: Authority, tmp_path: Path) -> None:
    followed = FollowedFiles(copied(ca.replica().trusting(ca), tmp_path / "tls"))
    before = followed.pems
    assert followed.current() == before
    copied(ca.replica().trusting(ca), tmp_path / "tls")
    assert followed.current() == followed.pems != before


async def test_a_router_with_all_its_connections_notices_what_is_renewed(
    ca: Authority, tmp_path: Path
) -> None:
    files = copied(ca.router().trusting(ca), tmp_path / "tls")
    tls = await asyncio.to_thread(RouterTls, files, "kvasir-replica")
    before = tls.ends["certificate"]
    new = self_signed(tmp_path / "new", NOW - 9 * DAY, NOW + 77 * DAY)
    copied(TlsFiles(new.certificate, new.key, ca.certificate), tmp_path / "tls")
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        looks = tasks.create_task(tls.follow(0.01))
        while tls.ends["certificate"] == before:  # noqa: ASYNC110 - the look is what is tested
            await asyncio.sleep(0.01)
        looks.cancel()
    assert tls.ends["certificate"] == (NOW + 77 * DAY).timestamp()


def test_broken_files_leave_those_before_in_force_are_logged_once_and_whole_ones_count_again(
    ca: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = copied(ca.replica().trusting(ca), tmp_path / "tls")
    followed = FollowedFiles(files)
    before = followed.pems
    assert files.key is not None
    Path(files.key).write_text("half of a ke")
    for _ in range(3):
        assert followed.current() == before
    (complaint,) = own_records(caplog, logging.ERROR)
    assert files.key in complaint.getMessage()
    copied(ca.replica().trusting(ca), tmp_path / "tls")
    assert followed.current() != before


def test_what_is_no_matter_of_tls_is_not_explained_by_it() -> None:
    refused = (
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to "
        "remote host: Connection refused"
    )
    assert explained(refused, None) is None
    assert explained("Socket closed", None) is None, "it was connected before"


def by_openssl(path: str) -> Validity:
    """Of the first certificate in the file."""
    command = [needed_tool("openssl"), "x509", "-in", path, "-noout", "-dates"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    begins, ends = (ssl.cert_time_to_seconds(line.partition("=")[2]) for line in lines)
    return Validity(begins, ends)


@pytest.mark.parametrize(
    ("begins", "ends"),
    [
        (datetime(2024, 2, 29, 23, 59, 59), datetime(2026, 3, 1)),
        (datetime(1955, 7, 8), datetime(1999, 12, 31, 1, 2, 3)),
        (datetime(2049, 12, 31, 23, 59, 59), datetime(2050, 1, 1)),
        (datetime(2051, 6, 5, 4, 3, 2), datetime(9999, 12, 31, 23, 59, 59)),
    ],
)
def test_dates_of_every_century_are_read(tmp_path: Path, begins: datetime, ends: datetime) -> None:
    path = self_signed(tmp_path, begins, ends).certificate
    (found,) = validities(Path(path).read_bytes())
    assert found == by_openssl(path)
    assert found == Validity(*(date.replace(tzinfo=UTC).timestamp() for date in (begins, ends)))


def test_what_an_authority_issues_is_read_as_openssl_reads_it(ca: Authority) -> None:
    paths = [ca.certificate, ca.replica().certificate, ca.router().certificate]
    together = b"some words before\n" + b"and between\n".join(Path(path).read_bytes() for path in paths)
    assert validities(together) == [by_openssl(path) for path in paths]


def test_what_is_cut_off_anywhere_is_a_value_error(ca: Authority) -> None:
    whole = ssl.PEM_cert_to_DER_cert(Path(ca.certificate).read_text())
    for length in range(len(whole)):
        with pytest.raises(ValueError):
            validities(ssl.DER_cert_to_PEM_cert(whole[:length]).encode())


@pytest.mark.parametrize("text", [b"", b"words", b"\xff", b"-----BEGIN CERTIFICATE-----\n"])
def test_text_without_a_certificate_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        validities(text)
