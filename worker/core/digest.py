"""Fingerprints: one digest over length-prefixed fields, so that no two field lists can collide by joining."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

FINGERPRINT_HEX = 32
_PLAIN = (str, bytes, int)


def fingerprint(*fields: str | bytes | int | Iterable[str | int]) -> str:
    """32 hexadecimal digits of SHA-256 over the fields, each prefixed with its length, sequences with their count."""
    return hashlib.sha256(framed(*fields)).hexdigest()[:FINGERPRINT_HEX]


def framed(*fields: str | bytes | int | Iterable[str | int]) -> bytes:
    """What a fingerprint is the digest of."""
    pieces: list[bytes] = []
    for item in fields:
        if isinstance(item, _PLAIN):
            _frame(pieces, item)
        else:
            parts = tuple(item)
            _frame(pieces, f"#{len(parts)}")
            for part in parts:
                _frame(pieces, part)
    return b"".join(pieces)


def _frame(pieces: list[bytes], item: str | bytes | int) -> None:
    data = item if isinstance(item, bytes) else str(item).encode()
    pieces.append(len(data).to_bytes(8, "big"))
    pieces.append(data)
