"""What an OpenAI-compatible server's JSON looks like, and which answers are believed.

Checked on vLLM 0.32.0 and llama.cpp's server (of xllamacpp 2026.10.11549). Nothing here does I/O. Errors quote neither
tickets nor the server's words.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.adapters.http_exchange import decoded
from worker.adapters.trial import without_folder
from worker.core.scores import MASS_TOLERANCE, LabelScores, Piece, are_token_ids
from worker.errors import ConfigError, InvalidAnswer

MOST_IDS = 128
"""vLLM 0.32 takes no more `logprob_token_ids` than this in one request."""
MASKED = -9000.0
"""vLLM and others write -9999.0 for a token that their sampler excluded, or did not look at."""
REASONS = {
    "out-of-vocab": "a label is outside the model's vocabulary",
    "out of vocabulary": "a token id is outside the model's vocabulary",
    "invalid tokens": "a token id is outside the model's vocabulary",
    "greater than max allowed": "it returns fewer log-probabilities than were asked for",
    "logprobs": "it does not accept the request for log-probabilities",
}
"""Our words for known refusals."""


@dataclass(frozen=True, slots=True)
class Position:
    """One output position as the server states it: log-probabilities by token id, and which token was sampled."""

    logprobs: Mapping[int, float]
    sampled: int

    def bound(self) -> float:
        """What a token that is not among the `logprobs` has at most, if those are the likeliest ones.

        The sampled token may have been added to them from below, so it says nothing about the others.
        """
        return min((value for token, value in self.logprobs.items() if token != self.sampled), default=0.0)


def completion_body(
    model: str,
    prompts: Sequence[Piece],
    *,
    top: int,
    label_ids: Sequence[int] = (),
    bias: Mapping[int, float] | None = None,
) -> dict[str, object]:
    """A `/v1/completions` request for one output token of each prompt.

    `top` log-probabilities are asked for, or those of `label_ids`. Temperature 0 keeps the sampled token the likeliest.
    """
    body: dict[str, object] = {
        "model": model,
        "prompt": list(prompts),
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": top,
        "return_tokens_as_token_ids": True,
    }
    if label_ids:
        body["logprob_token_ids"] = list(label_ids)
    if bias:
        body["logit_bias"] = {str(token): value for token, value in bias.items()}
    return body


def completion_bytes(prompts: int, entries: int) -> int:
    """An upper bound of the answer: llama.cpp spells each entry out in about 90 bytes, plus the token's own."""
    return 64 * 1024 + prompts * (4096 + 512 * (entries + 2))


def read_positions(body: bytes, prompts: int) -> list[Position]:
    """The first output position of each prompt, in order of the prompts. Raises InvalidAnswer for all of them."""
    choices = decoded(body).get("choices")
    if not isinstance(choices, list) or len(choices) != prompts or not all(isinstance(c, dict) for c in choices):
        raise InvalidAnswer(f"the answer does not hold one choice for each of {prompts} prompts")
    by_index = {choice.get("index"): choice for choice in choices if type(choice.get("index")) is int}
    if set(by_index) != set(range(prompts)):
        raise InvalidAnswer(f"the choices are not numbered 0 to {prompts - 1}")
    return [_position(by_index[place].get("logprobs")) for place in range(prompts)]


def _position(stated: object) -> Position:
    """From the completions' shape (vLLM) or the chat shape (llama.cpp, in `/v1/completions` too)."""
    if not isinstance(stated, dict):
        raise InvalidAnswer("a choice has no log-probabilities")
    content, sampled, top = stated.get("content"), stated.get("tokens"), stated.get("top_logprobs")
    pairs: list[tuple[int, object]] = []
    if isinstance(content, list) and content and isinstance(content[0], dict):
        entries = content[0].get("top_logprobs")
        entries = [content[0], *(entries if isinstance(entries, list) else ())]
        pairs = [(_entry_id(entry), entry.get("logprob")) for entry in entries if isinstance(entry, dict)]
        first = _entry_id(content[0])
    elif isinstance(sampled, list) and sampled and isinstance(top, list) and top and isinstance(top[0], dict):
        pairs = [(_token_id(name), value) for name, value in top[0].items()]
        first = _token_id(sampled[0])
    else:
        raise InvalidAnswer("a choice has no log-probabilities of its first token")
    found: dict[int, float] = {}
    for token, value in pairs:
        if type(value) is not float and type(value) is not int:  # `isinstance` takes True for an int
            raise InvalidAnswer("a log-probability is not a number")
        if not math.isfinite(value) or value > MASS_TOLERANCE:
            raise InvalidAnswer("a value is no log-probability (is the server run with --logprobs-mode raw_logits?)")
        if found.setdefault(token, float(value)) != value:
            raise InvalidAnswer("a token has two different log-probabilities")
    shown = {token: value for token, value in found.items() if value > MASKED}
    if not shown or math.fsum(map(math.exp, shown.values())) > 1.0 + MASS_TOLERANCE:
        raise InvalidAnswer("the log-probabilities of a choice are missing, or sum to more than 1")
    return Position(shown, first)


def _entry_id(entry: Mapping[str, Any]) -> int:
    token = entry.get("id")
    return token if type(token) is int and token >= 0 else _token_id(entry.get("token"))


def _token_id(name: object) -> int:
    match = re.fullmatch(r"token_id:(\d{1,18})", name) if isinstance(name, str) else None
    if match is None:
        raise InvalidAnswer("the server names tokens by their text only, by which two cannot be told apart")
    return int(match[1])


def label_scores(position: Position, labels: Sequence[int]) -> LabelScores:
    """From the likeliest tokens: a label that is not among them is unknown. Raises InvalidAnswer."""
    bound = position.bound()
    unknown = tuple(place for place, label in enumerate(labels) if label not in position.logprobs)
    return checked_scores([position.logprobs.get(label, bound) for label in labels], unknown)


def every_label(parts: Sequence[tuple[Position, Sequence[int]]]) -> LabelScores:
    """From calls that each asked for some of the labels by id. Raises InvalidAnswer where one did not come back."""
    pairs = list(itertools.chain.from_iterable(((position, label) for label in labels) for position, labels in parts))
    missing = sum(label not in position.logprobs for position, label in pairs)
    if missing:
        raise InvalidAnswer(f"{missing} of {len(pairs)} labels that were asked for by id did not come back")
    return checked_scores([position.logprobs[label] for position, label in pairs], ())


def checked_scores(logprobs: Sequence[float], unknown: tuple[int, ...]) -> LabelScores:
    try:
        return LabelScores.from_logprobs(tuple(min(value, 0.0) for value in logprobs), unknown)
    except ValueError as error:
        raise InvalidAnswer(f"the answer holds impossible scores: {error}") from None


def read_token_ids(body: bytes) -> list[int]:
    """Of one text."""
    row = decoded(body).get("tokens")
    if not isinstance(row, list) or not are_token_ids(row):
        raise InvalidAnswer("the answer does not hold token ids")
    return row


def read_piece(body: bytes) -> str:
    answer = decoded(body)
    piece = answer.get("prompt", answer.get("content"))
    if not isinstance(piece, str):
        raise InvalidAnswer("the answer does not hold the text of a token")
    return piece


def error_message(body: bytes) -> str:
    try:
        found = decoded(body)
    except InvalidAnswer:
        return ""
    error = found.get("error", found)
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""


def refusal_reason(body: bytes) -> str:
    message = error_message(body)
    return next((ours for theirs, ours in REASONS.items() if theirs in message), "for no known reason")


def read_cap(body: bytes) -> int | None:
    """How many log-probabilities a server returns at most, from its refusal to return more."""
    match = re.search(r"max(?:imum)?(?: value)? allowed:? (\d{1,6})", error_message(body))
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Served:
    """One model of `/v1/models`: under which name it is asked for, and everything stated that may change scores."""

    name: str
    description: str
    context_length: int | None
    vocabulary: int | None


def read_model(body: bytes, name: str | None) -> Served:
    """The model called `name`, or the only one. Raises ConfigError."""
    models = decoded(body).get("data")
    listed = [model for model in models if isinstance(model, dict)] if isinstance(models, list) else []
    names = [str(model.get("id")) for model in listed]
    if name is None and len(listed) != 1:
        raise ConfigError(
            f"the server lists {len(listed)} models: set ROUTER_ENGINE_MODEL to the name of one"
            + (f" ({', '.join(map(without_folder, names[:10]))})" if names else "")
        )
    found = next((model for model in listed if name in (None, model.get("id"), *_aliases(model))), None)
    if found is None:
        raise ConfigError(f"the server has no model '{name}' (ROUTER_ENGINE_MODEL)")
    meta = found.get("meta") if isinstance(found.get("meta"), dict) else {}
    assert isinstance(meta, dict)  # noqa: S101  (for the type checker)
    own = str(found.get("id"))
    root = without_folder(str(found.get("root") or own))
    parts = [f"{without_folder(own)} ({root})", f"server={found.get('owned_by', '?')}"]
    parts += [f"{key}={meta[key]}" for key in ("ftype", "n_params", "size") if meta.get(key) is not None]
    lengths = (found.get("max_model_len"), meta.get("n_ctx"))
    length = next((value for value in lengths if type(value) is int and value > 1), None)
    vocabulary = meta.get("n_vocab")
    return Served(own, " ".join(parts), length, vocabulary if type(vocabulary) is int else None)


def _aliases(model: Mapping[str, Any]) -> list[Any]:
    aliases = model.get("aliases")
    return aliases if isinstance(aliases, list) else []
