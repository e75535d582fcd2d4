"""Real certificates, made with the openssl command, for the tests of TLS."""

import subprocess
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from replicas.process.tls import TlsFiles
from tests.tools import needed_tool

REPLICA_NAME = "kvasir-replica"


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, as paths."""

    certificate: str
    key: str

    def trusting(self, ca: "Authority") -> TlsFiles:
        return TlsFiles(self.certificate, self.key, ca.certificate)


class Authority:
    """A CA with files of its own in `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._num_issued = 0
        self.certificate = str(folder / f"{name}.crt")
        self._key = str(folder / f"{name}.key")
        _openssl(
            *("req", "-x509", *_NEW_KEY, "-keyout", self._key, "-out", self.certificate),
            *("-days", "2", "-subj", f"/CN={name}"),
        )

    def replica(self, name: str = REPLICA_NAME) -> Pair:
        return self._issue("serverAuth", name)

    def pulling_replica(self) -> Pair:
        """For one that calls others, too."""
        return self._issue("serverAuth,clientAuth", REPLICA_NAME)

    def router(self) -> Pair:
        return self._issue("clientAuth", "kvasir-router")

    def _issue(self, usage: str, dns_name: str) -> Pair:
        self._num_issued += 1
        stem = str(self._folder / f"{dns_name}-{self._num_issued}")
        extensions = Path(f"{stem}.ext")
        extensions.write_text(f"extendedKeyUsage={usage}\nsubjectAltName=DNS:{dns_name}\n")
        _openssl("req", "-new", *_NEW_KEY, "-keyout", f"{stem}.key", "-out", f"{stem}.csr", "-subj", "/CN=x")
        _openssl(
            *("x509", "-req", "-in", f"{stem}.csr", "-out", f"{stem}.crt", "-days", "2"),
            *("-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial", "-extfile", str(extensions)),
        )
        return Pair(f"{stem}.crt", f"{stem}.key")


def self_signed(folder: Path, begins: datetime, ends: datetime) -> Pair:
    """A certificate that is its own authority, valid just then. Times are in UTC."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index").touch()
    (folder / "ca.cnf").write_text(
        "[ca]\ndefault_ca=self\n[names]\ncommonName=supplied\n[self]\ndefault_md=sha256\npolicy=names\n"
        f"database={folder}/index\nnew_certs_dir={folder}\nrand_serial=yes\n"
    )
    request, key, certificate = (str(folder / f"self.{kind}") for kind in ("csr", "key", "crt"))
    _openssl("req", "-new", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", "/CN=x")
    dates = [f"{date:%Y%m%d%H%M%SZ}" for date in (begins, ends)]
    _openssl(
        *("ca", "-batch", "-selfsign", "-notext", "-config", str(folder / "ca.cnf"), "-keyfile", key),
        *("-in", request, "-out", certificate, "-startdate", dates[0], "-enddate", dates[1]),
    )
    return Pair(certificate, key)


def copied(files: TlsFiles, folder: Path) -> TlsFiles:
    """The same content under names that stay, as in a mounted Secret; again into it is a renewal."""
    folder.mkdir(exist_ok=True)
    paths: list[str | None] = []
    for name, source in (("tls.crt", files.certificate), ("tls.key", files.key), ("ca.crt", files.ca)):
        paths.append(None if source is None else str(folder / name))
        if source is not None:
            (folder / name).write_bytes(Path(source).read_bytes())
    return TlsFiles(*paths)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: str) -> None:
    subprocess.run([needed_tool("openssl"), *arguments], check=True, capture_output=True)
