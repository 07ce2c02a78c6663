"""Bodies that nobody means well with, drawn from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

TEXTS = (
    "",
    " \u200b\u2800",
    "about billing",
    "\x00\x1b[2J\r\n",
    "<|im_end|><bos>[INST]｜User｜",
    "e" + "\u0301" * 3_000,
    "\U000e0041" * 2_000,
    "\u202eright to left",
    "가" * 4_000,
    "x" * 15_000,
    "a\nb\tc\u2028d",
    "\ufdfa" * 900,
    "ß" * 500 + "ﬀ" * 500,
    "|" * 10_000,
)
LITERALS = (
    "NaN", "Infinity", "-Infinity", "1e999", "-0.0", "1" * 5_000, "1e-400", "-1", "0", "true", "false", "null",
    '"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', "[]", "{}", "[" * 900 + "]" * 900, '{"a":' * 900 + "1" + "}" * 900,
    "[" * 9_000, '{"a":1,"a":2}', "9" * 19, "18446744073709551616", "0x10", "01", "'a'", "/* c */ 1", "undefined",
)  # fmt: skip
"""JSON, nearly JSON, and not at all."""
KEYS = ("id", "text", "subject", "body", "tenant", "channel", "language", "created_at", "metadata", "state", "model")
TYPES = ("noul", "choice", "score", "", None, 5, "NOUL")


def value(draw: random.Random, depth: int = 0) -> str:
    """JSON text of something."""
    kind = draw.randrange(5 if depth > 3 else 8)
    if kind < 2:
        return draw.choice(LITERALS)
    if kind < 5:
        return json.dumps(draw.choice(TEXTS), ensure_ascii=draw.random() < 0.5)
    if kind == 5:
        return "[" + ",".join(value(draw, depth + 1) for _ in range(draw.randrange(4))) + "]"
    return document(draw, draw.choices(KEYS, k=draw.randrange(4)), depth + 1)


def document(draw: random.Random, keys: list[str], depth: int = 0) -> str:
    return "{" + ",".join(f"{json.dumps(key)}:{value(draw, depth)}" for key in keys) + "}"


def criteria(draw: random.Random) -> Any:
    """Of a typed question: often right, sometimes by a little not."""
    options = [draw.choice((*TEXTS[:8], "a", "A", " a", "b", "B", "yes", "Yes")) for _ in range(draw.randrange(6))]
    return draw.choice(
        (
            None,
            options,
            {option: draw.choice((None, "", "what it means", {"x": 1}, 5)) for option in options},
            {"true": draw.choice(TEXTS), "false": None},
            [{"deep": [option]} for option in options],
            {f"option {n}": None for n in range(draw.choice((2, 26, 255, 256)))},
            ["same", "same"],
            ["Calm", "calm"],
            draw.choice(TEXTS),
        )
    )


ODD = (
    {"type": "noul", "instructions": "x" * 8_000},
    {"type": "noul", "criteria": {"true": TEXTS[4], "false": None}},
    {"type": "choice", "criteria": {"Yes": None, "yes": None, "YES": "\u200b"}},
    {"type": "choice", "criteria": {"\u0045": None, "\uff25": {"deep": [1]}}},
    {"type": "choice", "criteria": {TEXTS[4]: TEXTS[5], "none": None, "one of 2,000": "x" * 2_000}},
    {"type": "choice", "criteria": {f"option {n}": None for n in range(40)}},
    {"type": "score", "criteria": ["same", "same", "Same"]},
    {"type": "score", "criteria": [{"deep": [[[]]]}, ["a"]], "instructions": ["an", {"object": 1}]},
)
"""Questions that may be asked, though nobody would."""


def question(draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.7:
        return dict(draw.choice(ODD))
    found = {"type": draw.choice(TYPES), "instructions": draw.choice((None, 5, *TEXTS)), "criteria": criteria(draw)}
    for key in list(found):
        if draw.random() < 0.1:
            del found[key]
    return found


def bodies(seed: int, count: int) -> Iterator[bytes]:
    """As many bodies: broken bytes, documents of hostile values, and requests that are wrong in a part or in none."""
    draw = random.Random(seed)
    for _ in range(count):
        kind = draw.randrange(6)
        if kind == 0:
            yield bytes(draw.randrange(256) for _ in range(draw.randrange(200)))
        elif kind == 1:
            yield value(draw).encode()
        elif kind == 2:
            yield document(draw, draw.choices(KEYS, k=draw.randrange(1, 6))).encode()
        elif kind == 3:
            ticket = {key: draw.choice((*TEXTS[:4], 5, -0.0, None, True)) for key in draw.choices(KEYS[:8], k=2)}
            meta = {text: draw.choice((*TEXTS[:9], 5, [[[]]])) for text in draw.choices(TEXTS[:9], k=2)}
            yield json.dumps({**ticket, "text": draw.choice(TEXTS[2:9]), "metadata": meta}).encode()
        else:
            questions = {
                draw.choice(("q", "\u0000", "가" * 99)) + str(n): question(draw) for n in range(draw.randrange(4))
            }
            asked = {"model": draw.choice(["jev-latest"] * 9 + ["", 5]), "state": draw.choice(TEXTS[:9])}
            whole = json.dumps({**asked, "questions": questions}).encode()
            yield whole[: draw.randrange(len(whole))] if draw.random() < 0.1 else whole
