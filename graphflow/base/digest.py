"""SHA-256 of bytes, without loading OpenSSL, which the standard library does, at import."""

from __future__ import annotations


def sha256(data: bytes) -> bytes:
    """Return the SHA-256 digest of bytes."""
    from hashlib import sha256 as digest  # slow to load

    return digest(data).digest()
