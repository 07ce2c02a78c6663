"""Fingerprints: one digest over length-prefixed fields, so that no two field lists can collide by joining."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

FINGERPRINT_HEX = 32


def fingerprint(*fields: str | bytes | int | Iterable[str | int]) -> str:
    """32 hexadecimal digits of SHA-256 over the fields, each prefixed with its length, sequences with their count."""
    digest = hashlib.sha256()
    for item in fields:
        if isinstance(item, str | bytes | int):
            _feed(digest, item)
        else:
            parts = tuple(item)
            _feed(digest, f"#{len(parts)}")
            for part in parts:
                _feed(digest, part)
    return digest.hexdigest()[:FINGERPRINT_HEX]


def _feed(digest: hashlib._Hash, item: str | bytes | int) -> None:
    data = item if isinstance(item, bytes) else str(item).encode()
    digest.update(len(data).to_bytes(8, "big"))
    digest.update(data)
