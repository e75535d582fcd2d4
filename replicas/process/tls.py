"""TLS of gRPC: PEM files, read, checked, and followed when they are renewed.

Owns the required files, which of them are in force and until when, and the words for a failed handshake.
Between routers and replicas there are no roles: holders of a certificate of the CA are let in, within its
usages.
"""

import asyncio
import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import grpc

from replicas.process.settings import SettingsError
from replicas.process.validity import Validity, validities

LAST_SHARE = 0.1
"""A certificate should have been renewed before so little of its life is left."""

LOOK_SECONDS = 10.0
"""Between a router's looks at its files."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """One's own certificate (the chain, leaf first) and its key, and the CA that the other side must come
    from. Either part may be absent, but not the whole."""

    certificate: str | None
    key: str | None
    ca: str | None


@dataclass(frozen=True, slots=True)
class Pems:
    """Contents of the files."""

    certificate: bytes | None
    key: bytes | None = field(repr=False)
    ca: bytes | None

    @property
    def validities(self) -> Mapping[str, Validity]:
        """Return the validity of our certificate, and of the CA: of several the longest."""
        found: dict[str, Validity] = {}
        if self.certificate is not None:
            found["certificate"] = validities(self.certificate)[0]
        if self.ca is not None:
            found["ca"] = max(validities(self.ca), key=lambda validity: validity.ends)
        return found

    @property
    def ends(self) -> Mapping[str, float]:
        """Return the expiry times in seconds since 1970: `certificate` and `ca`, if present."""
        return {file: validity.ends for file, validity in self.validities.items()}


class FollowedFiles:
    """The newest whole files; `pems` is their last content. Thread-safe; `current` reads files, so not on an
    event loop."""

    def __init__(self, files: TlsFiles, clock: Callable[[], float] = time.time) -> None:
        """Raises SettingsError."""
        self._clock = clock
        self.pems = read_pems(files, clock())
        self._files = files
        self._complaint: str | None = None
        self._warnings: set[str] = set()
        self._lock = threading.Lock()
        self._warn()

    def current(self) -> Pems:
        """Return the files in force. A broken update is logged once and changes nothing."""
        with self._lock:
            try:
                pems = read_pems(self._files, self._clock(), known=self.pems)
            except SettingsError as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    logger.error(
                        "the renewed TLS files are broken; the previous ones stay in force: %s", error
                    )
                return self.pems
            self._complaint = None
            if pems != self.pems:
                self.pems = pems
                logger.info(
                    "TLS files were renewed certificate=%s ca=%s", self._files.certificate, self._files.ca
                )
            self._warn()
            return pems

    def _warn(self) -> None:
        """Once of each that will soon end."""
        now = self._clock()
        for file, validity in self.pems.validities.items():
            warning = (
                f"{getattr(self._files, file)} expires on {_date(validity.ends)}; it should have been renewed"
            )
            if validity.ends - now < LAST_SHARE * (validity.ends - validity.begins):
                if warning not in self._warnings:
                    logger.warning("%s", warning)
                self._warnings.add(warning)


def read_pems(files: TlsFiles, now: float, *, known: Pems | None = None) -> Pems:
    """Read and check, unless the content is `known`. Raises SettingsError with one sentence."""
    assert (files.certificate is None) == (files.key is None), "a certificate has a key"
    pems = _read_all(files)
    if pems == known:
        return pems
    if files.certificate is not None and pems.certificate is not None:
        _check_dates(files.certificate, _check_certificates(files.certificate, pems.certificate)[:1], now)
    if files.ca is not None and pems.ca is not None:
        _check_dates(files.ca, _check_certificates(files.ca, pems.ca), now)
    if files.certificate is not None and files.key is not None:
        _check_pair(files.certificate, files.key)
        if _read_all(files) != pems:
            raise SettingsError(f"{files.certificate} and {files.key} changed while they were read")
    return pems


def server_credentials(followed: FollowedFiles) -> grpc.ServerCredentials:
    """Return credentials for a server, which demands client certificates if the files name a CA; each
    handshake uses the current files."""

    served = followed.pems

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        # In a thread of gRPC's, before every handshake. None: as before.
        nonlocal served
        before, served = served, followed.current()
        return None if served == before else _server_configuration(served)

    return grpc.dynamic_ssl_server_credentials(
        _server_configuration(served),
        fetch,  # type: ignore[arg-type] # the stubs leave out None
        require_client_authentication=served.ca is not None,
    )


@dataclass(frozen=True, slots=True)
class ChannelTls:
    """TLS for new channels to replicas. `name` is the name on every replica's certificate, wherever it
    runs."""

    credentials: grpc.ChannelCredentials
    name: str

    @property
    def options(self) -> list[tuple[str, str]]:
        return [("grpc.ssl_target_name_override", self.name)]


class RouterTls:
    """The router's side: credentials for channels, made anew when the files are renewed."""

    def __init__(self, files: TlsFiles, name: str) -> None:
        """Raises SettingsError."""
        self._followed = FollowedFiles(files)
        self._name = name
        self._made_of = self._followed.pems
        self._current = self._make(self._made_of)

    @property
    def ends(self) -> Mapping[str, float]:
        """Return the expiry times in force, as `Pems.ends`."""
        return self._followed.pems.ends

    def current(self) -> ChannelTls:
        """Return the TLS of the current files. Reads them: not on an event loop."""
        if (pems := self._followed.current()) != self._made_of:
            self._made_of = pems
            self._current = self._make(pems)
        return self._current

    async def follow(self, seconds: float = LOOK_SECONDS) -> None:
        """Check for renewals until cancelled; a process with all its connections would not notice them."""
        while True:
            await asyncio.sleep(seconds)
            await asyncio.to_thread(self.current)

    def _make(self, pems: Pems) -> ChannelTls:
        return ChannelTls(grpc.ssl_channel_credentials(pems.ca, pems.key, pems.certificate), self._name)


def explained(details: str, tls: ChannelTls | None) -> str | None:
    """Explain a failed connection by gRPC's details; None if it is not known to be TLS."""
    if "failed to connect" not in details:
        return None
    if "Socket closed" in details or "Connection reset" in details:
        if tls is None:
            return "it hangs up at once: it may want TLS, and this router has no replica_tls_ca"
        return "it hangs up at once: it may want another certificate of this router, or one at all"
    if "WRONG_VERSION_NUMBER" in details:
        return "it does not speak TLS, and this router wants it"
    if "Hostname Verification" in details:
        return f"its certificate is not for {'' if tls is None else tls.name}"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        reason = details.partition("CERTIFICATE_VERIFY_FAILED: ")[2].removesuffix(": OK")
        return f"its certificate is not believed: {reason}"
    return None


def _server_configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    assert pems.key is not None and pems.certificate is not None, "a server has a certificate"
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.certificate)], pems.ca)


def _read_all(files: TlsFiles) -> Pems:
    return Pems(*(None if path is None else _read(path) for path in (files.certificate, files.key, files.ca)))


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error


def _check_certificates(path: str, content: bytes) -> list[Validity]:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii"))
        return validities(content)
    except (ValueError, ssl.SSLError) as error:  # UnicodeDecodeError is a ValueError
        raise SettingsError(f"{path} holds no certificate in PEM form") from error


def _check_dates(path: str, found: list[Validity], now: float) -> None:
    """Check that at least one is valid."""
    if any(validity.begins <= now <= validity.ends for validity in found):
        return
    last = max(found, key=lambda validity: validity.ends)
    if last.begins > now:
        raise SettingsError(f"the certificate in {path} is not valid before {_date(last.begins)}")
    raise SettingsError(f"the certificate in {path} expired on {_date(last.ends)}")


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _check_pair(certificate: str, key: str) -> None:
    try:
        # The password keeps OpenSSL from asking the terminal for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=b"")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise SettingsError(
                f"the key in {key} does not belong to the certificate in {certificate}"
            ) from error
        raise SettingsError(f"{key} holds no key in PEM form without a password") from error
    except OSError as error:
        raise SettingsError(f"cannot read {certificate} and {key}: {error.strerror}") from error
