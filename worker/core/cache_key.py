"""Cache keys: alone knows what makes two scores interchangeable, and which are kept at all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from worker.core.scores import LabelScores

KEY_BYTES = 20
"""160 bits: by accident no two of 10^20 tickets share a key (chance below 10^-8)."""


def cacheable(scores: LabelScores, *, flagged: bool = False) -> bool:
    """Whether these scores may answer for the next equal ticket.

    Not what is unstable, that is an answer without all of its labels: another may have them. Not that of a ticket which
    was `flagged`: whoever writes such tickets must not get one answer to stay.
    """
    return not (flagged or scores.unknown)


class ScoreKey:
    """Makes the key of a ticket's label scores: the rule set's id in clear, by which its entries can be told from
    others', and keyed BLAKE2b over length-prefixed fields, in hexadecimal.

    Without the secret a key says nothing about its ticket, and none can be made. `label_token_ids` count in their
    order, which is the order of the cached scores. A missing tenant and an empty one differ.
    """

    __slots__ = ("_fixed", "_scope")

    def __init__(
        self,
        secret: bytes,
        *,
        rule_set: str,
        model: str,
        tokenizer: str,
        prompt: str,
        label_token_ids: Sequence[int],
        category_set: str,
        normaliser: str,
    ) -> None:
        """`rule_set` is the id; the rest are fingerprints. Raises ValueError on an empty secret."""
        if not secret:
            raise ValueError("the cache secret is empty")
        # BLAKE2b takes at most 64 key bytes; a digest of the secret keeps all of a longer one.
        self._fixed = hashlib.blake2b(key=hashlib.sha256(secret).digest(), digest_size=KEY_BYTES, person=b"score key")
        labels = "".join(_framed(map(str, label_token_ids)))
        self._scope = f"{rule_set}:"
        fields = (normaliser, model, tokenizer, prompt, labels, category_set)
        self._fixed.update("".join(_framed(fields)).encode())

    def __call__(self, tenant: str | None, text: str) -> str:
        """The key for canonical text: `<rule set>:` and 40 hexadecimal digits."""
        digest = self._fixed.copy()
        owner = "-" if tenant is None else f"{len(tenant)}:{tenant}"
        digest.update(f"{owner}{len(text)}:{text}".encode(errors="surrogatepass"))
        return self._scope + digest.hexdigest()


def _framed(fields: Iterable[str]) -> Iterable[str]:
    """Each field behind its length in characters: lists of fields that differ give texts that differ."""
    return (f"{len(item)}:{item}" for item in fields)
