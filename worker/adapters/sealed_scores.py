"""Sealed scores: alone knows how a cached value is laid out, and when it is believed."""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache
from struct import Struct
from typing import Final

from worker.core.scores import LabelScores

FORMAT: Final = 1
PARTIAL_FORMAT: Final = 2
"""Without and with unknown labels; a worker that does not know the second takes such a value for a miss."""
TAG_BYTES: Final = 16
HEADER: Final = Struct("<BH")
"""Format and number of labels; then (`_layout`) as many doubles, the label mass, in a partial value the places of the
unknown labels (16 bits each), and the tag."""


class Seal:
    """Makes a value of scores, and scores of a value, with a keyed digest of its key and content: whoever can write
    values without the secret steers no ticket."""

    def __init__(self, secret: bytes) -> None:
        # Keyed once: what `tag` copies has taken in the block that holds the key.
        self._keyed = hashlib.blake2b(key=hashlib.sha256(secret).digest(), digest_size=TAG_BYTES, person=b"score value")

    def close(self, key: str, scores: LabelScores) -> bytes:
        logprobs, unknown = scores.logprobs, scores.unknown
        form = PARTIAL_FORMAT if unknown else FORMAT
        payload = _layout(len(logprobs), len(unknown)).pack(form, len(logprobs), *logprobs, scores.mass, *unknown)
        return payload + self.tag(key, payload)

    def open(self, key: str, value: bytes) -> LabelScores | None:
        """None unless the value was made by `close` for this very key."""
        payload = value[:-TAG_BYTES]
        if not hmac.compare_digest(value[-TAG_BYTES:], self.tag(key, payload)) or len(payload) < HEADER.size:
            return None
        form, count = HEADER.unpack_from(payload)
        hidden, odd = divmod(len(payload) - HEADER.size - 8 * (count + 1), 2)
        if not count or odd or hidden < 0 or form != (PARTIAL_FORMAT if hidden else FORMAT):
            return None
        fields = _layout(count, hidden).unpack(payload)
        try:
            return LabelScores(fields[2 : count + 2], fields[count + 2], fields[count + 3 :]).checked()
        except ValueError:
            return None

    def tag(self, key: str, payload: bytes) -> bytes:
        digest = self._keyed.copy()
        digest.update(f"{len(key)}:{key}".encode() + payload)
        return digest.digest()


@lru_cache(maxsize=64)
def _layout(labels: int, unknown: int) -> Struct:
    """Of a value but for its tag. A rule set and its further questions have few."""
    return Struct(f"{HEADER.format}{labels + 1}d{unknown}H")
