"""Cache keys: alone knows what makes two scores interchangeable, and hides it behind a secret."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from worker.core.normalise import NORMALISER_VERSION

KEY_BYTES = 20
"""160 bits: by accident no two of 10^20 tickets share a key (chance below 10^-8)."""


class ScoreKey:
    """Makes the key of a ticket's label scores: keyed BLAKE2b over length-prefixed fields, in hexadecimal.

    Without the secret a key says nothing about its ticket, and none can be made. `label_token_ids` count in their
    order, which is the order of the cached scores. A missing tenant and an empty one differ.
    """

    __slots__ = ("_fixed",)

    def __init__(
        self,
        secret: bytes,
        *,
        model: str,
        tokenizer: str,
        prompt: str,
        label_token_ids: Sequence[int],
        category_set: str,
    ) -> None:
        """Raises ValueError on an empty secret."""
        if not secret:
            raise ValueError("the cache secret is empty")
        # BLAKE2b takes at most 64 key bytes; a digest of the secret keeps all of a longer one.
        self._fixed = hashlib.blake2b(key=hashlib.sha256(secret).digest(), digest_size=KEY_BYTES, person=b"score key")
        labels = "".join(_framed(map(str, label_token_ids)))
        fields = (NORMALISER_VERSION, model, tokenizer, prompt, labels, category_set)
        self._fixed.update("".join(_framed(fields)).encode())

    def __call__(self, tenant: str | None, text: str) -> str:
        """The key for canonical text, 40 hexadecimal digits."""
        digest = self._fixed.copy()
        owner = "-" if tenant is None else f"{len(tenant)}:{tenant}"
        digest.update(f"{owner}{len(text)}:{text}".encode(errors="surrogatepass"))
        return digest.hexdigest()


def _framed(fields: Iterable[str]) -> Iterable[str]:
    """Each field behind its length in characters: lists of fields that differ give texts that differ."""
    return (f"{len(item)}:{item}" for item in fields)
