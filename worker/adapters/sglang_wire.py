"""What SGLang's JSON looks like: the bodies sent, and which answers are believed.

Checked on SGLang 0.5.23; what 0.5.9 leaves out (token_logprobs, usage) is done without.

Nothing here does I/O. Errors quote neither tickets nor the server's words, which may hold its paths.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from worker.adapters.http_exchange import decoded, encoded
from worker.adapters.trial import without_folder
from worker.core.scores import LabelScores, ScoreRequest, are_token_ids
from worker.errors import ConfigError, InvalidAnswer, TooLong

RESERVED_TOKENS = 7
"""The longest prompt accepted is the context length less this."""

TOO_LONG = (
    (re.compile(r"\((\d+) tokens\) exceeds the maximum allowed length \((\d+) tokens\)"), 1),
    (re.compile(r"\((\d+) tokens\) is longer than the model's context length \((\d+) tokens\)"), RESERVED_TOKENS),
)
"""The scheduler's and the tokenizer manager's wording, and how far below the stated length the limit lies."""

REASONS = {
    "out of vocabulary": "a label is outside the model's vocabulary",
    "label_token_ids": "it does not accept the label ids",
    "not supported": "this model does not support it",
}
"""Our words for known refusals."""


def score_body(requests: Sequence[ScoreRequest]) -> bytes:
    """The `/v1/score` request for requests that passed `check_batch`. Raises RequestRefused on text that is no Unicode.

    Text is joined by the server before it is tokenized; token ids are joined as they are, without BOS.
    """
    return encoded(
        {
            "query": requests[0].prefix,
            "items": [request.item for request in requests],
            "label_token_ids": requests[0].label_token_ids,
            "apply_softmax": False,
            "return_token_logprobs": True,
        }
    )


def score_answer_bytes(items: int, labels: int) -> int:
    """An upper bound: two tables of numbers, each number at most 25 characters and its layout."""
    return 64 * 1024 + 2 * 64 * items * labels


def read_scores(body: bytes, items: int, labels: int) -> tuple[LabelScores, ...]:
    """One row an item, or InvalidAnswer for all of them: rows and columns are matched by position only.

    `token_logprobs` are the labels' log-probabilities over the full vocabulary. Servers before 0.5.21 do not know the
    field; their `scores` without softmax are the same probabilities, linear.
    """
    answer = decoded(body)
    linear, logarithmic = answer.get("scores"), answer.get("token_logprobs")
    for table in (linear,) if logarithmic is None else (linear, logarithmic):
        if not isinstance(table, list) or len(table) != items:
            raise InvalidAnswer(f"the answer does not hold one row for each of {items} prompts")
    assert isinstance(linear, list)  # noqa: S101  (for the type checker; seen above)
    try:
        if logarithmic is None:
            return tuple(LabelScores.from_logprobs(logarithms(row_of(labels, row))) for row in linear)
        return tuple(LabelScores.from_logprobs(row_of(labels, row)) for row in logarithmic)
    except ValueError as error:
        raise InvalidAnswer(f"the answer holds impossible scores: {error}") from None


def logarithms(probabilities: tuple[float, ...]) -> tuple[float, ...]:
    if min(probabilities) <= 0:  # also what an underflow left of a tiny one: a logarithm of it would be a guess
        raise ValueError("a label probability is not above 0")
    return tuple(map(math.log, probabilities))


def row_of(labels: int, row: object) -> tuple[float, ...]:
    if not isinstance(row, list) or len(row) != labels:
        raise InvalidAnswer(f"a row does not hold one score for each of {labels} labels")
    for value in row:
        if type(value) is not float and type(value) is not int:  # `isinstance` takes True for an int
            raise InvalidAnswer("a score is not a number")
    return tuple(row)


def read_token_ids(body: bytes, texts: int) -> list[list[int]]:
    rows = decoded(body).get("tokens")
    if (
        not isinstance(rows, list)
        or len(rows) != texts
        or not all(isinstance(r, list) and are_token_ids(r) for r in rows)
    ):
        raise InvalidAnswer(f"the answer does not hold token ids for each of {texts} texts")
    return rows


def detokenize_body(token_ids: Sequence[int]) -> bytes:
    return encoded({"tokens": [[token] for token in token_ids], "skip_special_tokens": False})


def read_pieces(body: bytes, tokens: int) -> list[str]:
    pieces = decoded(body).get("text")
    if not isinstance(pieces, list) or len(pieces) != tokens or not all(isinstance(piece, str) for piece in pieces):
        raise InvalidAnswer(f"the answer does not hold a text for each of {tokens} tokens")
    return pieces


def turns_body(messages: Sequence[tuple[str, str]]) -> bytes:
    """Templates that know no such switch leave it alone."""
    listed = [{"role": role, "content": text} for role, text in messages]
    return encoded({"messages": listed, "chat_template_kwargs": {"enable_thinking": False, "thinking": False}})


def read_turns(body: bytes) -> list[int]:
    row = decoded(body).get("tokens")
    if not isinstance(row, list) or not are_token_ids(row):
        raise InvalidAnswer("the answer does not hold token ids")
    return row


def read_too_long(body: bytes, known_limit: int | None) -> TooLong | None:
    """From a 400's body; None where it is about something else."""
    message = error_message(body)
    for wording, below in TOO_LONG:
        if match := wording.search(message):
            return TooLong(int(match[1]), known_limit or int(match[2]) - below)
    return None


def read_vocabulary(body: bytes) -> int | None:
    """From the refusal of a label that no vocabulary holds: the number of tokens, where it is stated."""
    match = re.search(r"vocab size: (\d+)", error_message(body))
    return int(match[1]) if match else None


def refusal_reason(body: bytes) -> str:
    message = error_message(body)
    return next((ours for theirs, ours in REASONS.items() if theirs in message), "for no known reason")


def error_message(body: bytes) -> str:
    try:
        message = decoded(body).get("message")
    except InvalidAnswer:
        return ""
    return message if isinstance(message, str) else ""


def context_tokens(server: Mapping[str, Any], models: Mapping[str, Any]) -> int:
    """The longest prompt accepted. The scheduler's own bound counts first: a small KV pool may lie below the context
    length. Raises ConfigError where neither is stated."""
    refused_from = server.get("max_req_input_len")
    if type(refused_from) is int and refused_from > 1:
        return refused_from - 1
    try:
        length = models["data"][0]["max_model_len"]
    except (KeyError, IndexError, TypeError):
        length = server.get("context_length")
    if type(length) is not int or length <= RESERVED_TOKENS:
        raise ConfigError("the SGLang server states no context length, in /server_info or /v1/models")
    return length - RESERVED_TOKENS


def model_name(model: Mapping[str, Any], server: Mapping[str, Any]) -> str:
    """Everything stated that changes scores: names, weights and the head's precision. Local folders stay out."""
    name = without_folder(str(model.get("model_path", "?")))
    parts = [f"{model.get('served_model_name') or name} ({name})", f"weights={model.get('weight_version', '?')}"]
    for key in ("revision", "dtype", "quantization", "kv_cache_dtype", "enable_fp32_lm_head", "model_checksum"):
        if server.get(key) not in (None, False, "auto"):
            parts.append(f"{key}={server[key]}")
    return " ".join(parts)
