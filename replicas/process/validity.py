"""Validity of certificates, read from their PEM text.

It trusts the text: OpenSSL checks signatures.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Validity:
    """Seconds since 1970."""

    begins: float
    ends: float


def validities(pem: bytes) -> list[Validity]:
    """One for each certificate, in order; at least one. Raises ValueError."""
    from cryptography import x509  # 20 MB, for those alone who have certificates

    return [
        Validity(found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp())
        for found in x509.load_pem_x509_certificates(pem)
    ]
