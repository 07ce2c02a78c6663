"""The probe texts by which two tokenizers are told apart, and the digest of what one makes of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

PROBE_TEXTS = (
    "Question: which team handles this ticket?\nAnswer: A",
    "I was charged twice; please refund $1,234.56 to card 4111-0000, order #98765!",
    "엘리베이터가 고장 났는데 언제 고쳐지나요? 정답: 가",
    "0 1 12 123 1234 12345 3.14 2026-01-31 \u0967\u0968\u0969",
    "  two  spaces\t a tab\n\n\nthree lines \u00a0 \u3000 end ",
    "<bos><eos><start_of_turn>user<end_of_turn><|im_start|>system<|im_end|>[INST] </s> <|endoftext|>",
    "na\u00efve cafe\u0301 \ufb01 \u00c5 A\u030a \u6f22\u5b57 \u304b\u306a \U0001f469\u200d\U0001f467 \u202eltr",
    "def score(x): return {'a': [1, 2]}  # code",
)
"""English, Korean, digits, whitespace, control-token spellings, composed and decomposed letters, code."""


def tokenizer_digest(token_ids: Sequence[Sequence[int]]) -> str:
    """sha256 (hex) over the token ids of `PROBE_TEXTS`, in order; BOS and other additions are part of it."""
    spelled = ";".join(",".join(map(str, ids)) for ids in token_ids)
    return hashlib.sha256(spelled.encode("ascii")).hexdigest()
