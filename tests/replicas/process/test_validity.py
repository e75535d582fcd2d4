"""Dates of certificates: those that OpenSSL itself reads."""

import ssl
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from replicas.process.validity import Validity, validities
from tests.certificates import Authority, self_signed
from tests.tools import needed_tool


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
