"""How a decision API is asked: `POST /v1/systemone` (Jev and servers compatible with it), or SGLang's `/v1/decisions`.

Such an API is given a text and named options and returns a probability for each; there are no tokens to see. Its
answer is the *distribution*: what it calls `confidence`, (K max p - 1) / (K - 1) in the public specification and
something else on other servers, is no probability and is never read. Checked against jevcompat 0.1.1 and SGLang 0.5.23.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, assert_never

from worker.adapters.http_exchange import (
    INFO_BYTES,
    SMALL_BYTES,
    Answer,
    HttpExchange,
    Misconfigured,
    Server,
    decoded,
    encoded,
)
from worker.adapters.tokenizer_digest import PROBE_TEXTS, tokenizer_digest
from worker.core.scores import LabelScores, ScoreRequest, check_batch
from worker.errors import ConfigError, EngineDropped, EngineError, EngineUnavailable, InvalidAnswer, RequestRefused
from worker.ports import EngineIdentity

Dialect = Literal["systemone", "decisions"]

SERVER = Server(
    name="the decision API",
    key="set ROUTER_ENGINE_API_KEY to the one that it was given",
    address="the base URL must lead to a server with /v1/systemone or /v1/decisions, and the model must be its own",
)
ALIAS = "jev-latest"
MOST_OPTIONS: Mapping[Dialect, int] = {"systemone": 255, "decisions": 26}
SUM_TOLERANCE = 0.05
"""By how much the probabilities may miss 1: servers round them, most to two decimals."""
FINEST_DECIMALS = 6
QUESTION = "q"
WORDS = 32_000
"""Said to be the longest prompt, in the words that stand for tokens here: these APIs do not state theirs."""
WORD = re.compile(r" ?[^\s]{1,48}|\s")
NOTES = (
    "a decision API: probabilities over the options only, so that the label mass says nothing (SGLang's /v1/decisions "
    "states it), rounded as the server rounds; it is there to compare with",
)


class SystemOneEngine:
    """A ScoringEngine on a decision API, one request a ticket.

    The prompt's prefix is the question's instructions, the ticket with its cue is the state, and the label words are
    the options. A word stands for a token, and its id is the word itself in bytes, so that any instance reads it back.
    A probability that was rounded to 0 is an unknown label, bounded by the rounding.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        connections: int = 16,
        timeout_s: float = 30.0,
        connect_timeout_s: float = 3.0,
        ca_file: Path | None = None,
    ) -> None:
        """Connects to nothing yet. Raises ConfigError on an address, a key or a `ca_file` that cannot be used."""
        self._http = HttpExchange(
            base_url.rstrip("/").removesuffix("/v1"),
            SERVER,
            api_key=api_key,
            connections=connections,
            connect_timeout_s=connect_timeout_s,
            ca_file=ca_file,
        )
        self._model = model
        self._timeout_s = timeout_s
        self._dialect: Dialect | None = None

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        if not requests:
            return ()
        check_batch(requests)
        return [(await self._decide(request))[0] for request in requests]

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        return [[_word_id(word) for word in WORD.findall(text)] for text in texts]

    async def identity(self) -> EngineIdentity:
        (ids,) = await self.tokenize([" billing login other"])
        trial = ScoreRequest("Which team handles this ticket?", "I was charged twice.", tuple(ids))
        try:
            _, model = await self._decide(trial)
        except Misconfigured as error:
            raise ConfigError(str(error)) from None
        except (RequestRefused, InvalidAnswer) as error:
            raise ConfigError(f"a trial question failed: {error}") from None
        except EngineDropped as error:
            raise EngineUnavailable(str(error)) from None
        return EngineIdentity(
            engine="systemone",
            model=f"{model} api={self._dialect}",
            tokenizer=tokenizer_digest(await self.tokenize(PROBE_TEXTS)),
            context_tokens=WORDS,
            notes=NOTES,
        )

    async def probe(self) -> None:
        answer = await self._http.ask("GET", "/v1/models", None, INFO_BYTES, self._timeout_s)
        if answer.status not in (200, 404):  # the list of models is optional
            raise self._refusal(answer)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _decide(self, request: ScoreRequest) -> tuple[LabelScores, str]:
        """Scores of one ticket, and the model that the answer names."""
        prefix, item = request.prefix, request.item
        if not isinstance(prefix, str) or not isinstance(item, str):
            raise RequestRefused("a decision API takes text, no token ids")
        options = [_word(token) for token in request.label_token_ids]
        answers: list[Answer] = []
        dialects: tuple[Dialect, ...] = ("systemone", "decisions") if self._dialect is None else (self._dialect,)
        for dialect in dialects:
            if not 2 <= len(options) <= MOST_OPTIONS[dialect]:
                raise RequestRefused(f"{len(options)} labels: this decision API takes 2 to {MOST_OPTIONS[dialect]}")
            body = encoded(_body(dialect, self._model, prefix, item.strip(), options))
            answer = await self._http.ask("POST", f"/v1/{dialect}", body, SMALL_BYTES, self._timeout_s)
            answers.append(answer)
            if answer.status not in (404, 501):
                break
        if answer.status != 200:
            # A server that knows the path, and has no model for it, says more than one that does not.
            raise self._refusal(next((one for one in answers if one.status == 501), answer))
        self._dialect = dialect
        return _read(answer.body, options)

    def _refusal(self, answer: Answer) -> EngineError:
        if answer.status == 501:
            return Misconfigured("the server runs no decision model (HTTP 501)")
        failure = self._http.failure(answer)
        if failure is not None:
            return failure
        template = b"chat_template" in answer.body
        reason = "its model has no chat template" if template else "for no known reason"
        return RequestRefused(f"{SERVER.name} refuses the request (HTTP {answer.status}, {reason})", answer.status)


def _body(dialect: Dialect, model: str | None, instructions: str, state: str, options: Sequence[str]) -> dict[str, Any]:
    match dialect:
        case "systemone":
            question = {"type": "choice", "instructions": instructions, "criteria": dict.fromkeys(options)}
            return {"model": model or ALIAS, "state": state, "questions": {QUESTION: question}}
        case "decisions":
            listed = [{"name": option} for option in options]
            asked = {"id": QUESTION, "type": "choice", "question": instructions, "options": listed}
            return {"input": state, "questions": [asked]} | ({"model": model} if model else {})
        case _:
            assert_never(dialect)


def _read(body: bytes, options: Sequence[str]) -> tuple[LabelScores, str]:
    """Raises InvalidAnswer."""
    found = decoded(body)
    answers = found.get("answers")
    answer = answers.get(QUESTION) if isinstance(answers, dict) else None
    stated = answer.get("probabilities") if isinstance(answer, dict) else None
    if not isinstance(answer, dict) or not isinstance(stated, dict) or set(stated) != set(options):
        raise InvalidAnswer("the answer does not hold a probability for each option, and for these only")
    values = [stated[option] for option in options]
    if not all(type(value) in (int, float) and 0.0 <= value <= 1.0 for value in values):
        raise InvalidAnswer("a probability is not a number from 0 to 1")
    total = math.fsum(values)
    if abs(total - 1.0) > SUM_TOLERANCE:
        raise InvalidAnswer("the probabilities do not sum to 1")
    mass: object = answer.get("label_mass", answer.get("x_label_mass", 1.0))
    if not isinstance(mass, int | float) or not 0.0 < mass <= 1.0:
        raise InvalidAnswer("the label mass is not a number above 0 and at most 1")
    scale = mass / max(1.0, total)
    half_step = _half_step(values)
    unknown = tuple(place for place, value in enumerate(values) if value <= 0.0)
    logprobs = tuple(min(0.0, math.log((value or half_step) * scale)) for value in values)
    try:
        return LabelScores.from_logprobs(logprobs, unknown), str(found.get("model", "?"))
    except ValueError as error:
        raise InvalidAnswer(f"the answer holds impossible scores: {error}") from None


def _half_step(values: Sequence[float]) -> float:
    """The most that a probability had that is shown as 0: half a unit of the last decimal in which all are exact."""
    for decimals in range(2, FINEST_DECIMALS + 1):
        if all(abs(value - round(value, decimals)) < 1e-9 for value in values):
            return 0.5 * 10.0**-decimals
    return 0.5 * 10.0**-FINEST_DECIMALS


def _word_id(word: str) -> int:
    """Bytes as a number, behind a 1 that keeps leading zeros. Surrogates pass; encoding the request refuses them."""
    return int.from_bytes(b"\x01" + word.encode(errors="surrogatepass"), "big")


def _word(token: int) -> str:
    """Inverse of `_word_id`, without the space before it. Raises RequestRefused."""
    data = token.to_bytes((token.bit_length() + 7) // 8, "big")
    try:
        word = data[1:].decode().strip() if data[:1] == b"\x01" else ""
    except UnicodeDecodeError:
        word = ""
    if not word:
        raise RequestRefused("a label is no word of this engine")
    return word
