"""How an OpenAI-compatible server (vLLM, llama.cpp's, others) is made to say how likely each label is.

One `POST /v1/completions` carries the prompts of a batch; of the one token that each generates only the
log-probabilities beside it are read. Two ways of reading, found out by a trial: `logprob_token_ids` gives every label's
(vLLM); otherwise the server's likeliest tokens are read, and a label that is not among them is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from worker.adapters import openai_wire as wire
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
from worker.adapters.trial import TRIAL_PROMPT, TRIAL_TEXTS, grid_note, trial_labels
from worker.core.scores import LabelScores, Piece, ScoreRequest, check_batch
from worker.errors import (
    ConfigError,
    EngineDropped,
    EngineError,
    EngineUnavailable,
    InvalidAnswer,
    RequestRefused,
    TooLong,
)
from worker.ports import EngineIdentity

SERVER = Server(
    name="the OpenAI-compatible server",
    key="set ROUTER_ENGINE_API_KEY to the one that the server was given",
    address="the base URL must lead to a server with /v1/models, /v1/completions and /tokenize",
)
TOPS = (1024, 256, 128, 64, 20, 10, 5, 1)
"""How many likeliest tokens are asked for, the first that the server grants."""
BIAS = 10.0
"""Nats. Added to a label in a trial: it shows in the answer only where the server reports what its sampler made."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How this server's labels are read."""

    way: Literal["ids", "top"]
    top: int
    """How many likeliest tokens it returns; with `ids` it does not matter."""


class OpenAICompatEngine:
    """A ScoringEngine on one server.

    The server must name tokens by id (vLLM and llama.cpp do), tokenize, and state its context length.
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
        control_timeout_s: float = 10.0,
        ca_file: Path | None = None,
    ) -> None:
        """Connects to nothing yet; an address that ends in /v1 is taken for the server's. `model` is needed where the
        server has several. Raises ConfigError on an address, a key or a file that cannot be used. The rest as in
        SGLangEngine."""
        self._http = HttpExchange(
            base_url.rstrip("/").removesuffix("/v1"),
            SERVER,
            api_key=api_key,
            connections=connections,
            connect_timeout_s=connect_timeout_s,
            ca_file=ca_file,
        )
        self._named = model
        self._timeout_s = timeout_s
        self._control_timeout_s = control_timeout_s
        self._served: wire.Served | None = None
        self._reading: Reading | None = None
        self._limit: int | None = None
        self._refuses_too_long = False
        self._learning = asyncio.Lock()

    @property
    def learnt(self) -> Reading | None:
        """How labels are read, once that is known."""
        return self._reading

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        if not requests:
            return ()
        check_batch(requests)
        if self._reading is None:
            async with self._learning:
                if self._reading is None:
                    await self._learn()
        reading, served = self._reading, self._served
        assert reading is not None and served is not None  # noqa: S101  (for the type checker)
        labels, prompts = requests[0].label_token_ids, [request.prompt for request in requests]
        if served.vocabulary is not None and max(labels) >= served.vocabulary:
            raise RequestRefused("a label is outside the model's vocabulary")
        if reading.way == "top":
            return [wire.label_scores(position, labels) for position in await self._positions(prompts, reading.top)]
        parts = [labels[start : start + wire.MOST_IDS] for start in range(0, len(labels), wire.MOST_IDS)]
        answers = [await self._positions(prompts, 1, part) for part in parts]
        return [wire.every_label(list(zip(rows, parts, strict=True))) for rows in zip(*answers, strict=True)]

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        rows = []
        for text in texts:
            # vLLM reads the one pair of fields and llama.cpp the other; both leave alone what they do not know.
            asked = {"prompt": text, "add_special_tokens": True, "content": text, "add_special": True}
            body = encoded(asked | ({"model": self._served.name} if self._served else {}))
            answer = await self._ask("POST", "/tokenize", body, SMALL_BYTES + 16 * len(body))
            rows.append(wire.read_token_ids(answer.body))
        return rows

    async def pieces(self, token_ids: Sequence[int]) -> list[str]:
        found = []
        for token in token_ids:
            body = encoded({"tokens": [token]} | ({"model": self._served.name} if self._served else {}))
            found.append(wire.read_piece((await self._ask("POST", "/detokenize", body, SMALL_BYTES)).body))
        return found

    async def tokenize_turns(self, messages: Sequence[tuple[str, str]]) -> list[int] | None:
        listed = [{"role": role, "content": text} for role, text in messages]
        body = encoded(
            {"messages": listed, "chat_template_kwargs": {"enable_thinking": False, "thinking": False}}
            | ({"model": self._served.name} if self._served else {})
        )
        limit = SMALL_BYTES + 16 * len(body)
        written = await self._http.ask("POST", "/apply-template", body, limit, self._control_timeout_s)
        if written.status == 200:  # llama.cpp
            return (await self.tokenize([wire.read_piece(written.body)]))[0]
        answer = await self._http.ask("POST", "/tokenize", body, limit, self._control_timeout_s)
        return wire.read_token_ids(answer.body) or None if answer.status == 200 else None

    async def identity(self) -> EngineIdentity:
        try:
            async with self._learning:
                trial = await self._learn()
            token_ids = await self.tokenize(PROBE_TEXTS)
            await self._check_too_long(token_ids[0])
        except Misconfigured as error:
            raise ConfigError(str(error)) from None
        except RequestRefused as error:
            raise ConfigError(f"a trial request failed: {error}") from None
        except InvalidAnswer as error:
            raise ConfigError(f"the server's answers cannot be used: {error}") from None
        except EngineDropped as error:
            raise EngineUnavailable(str(error)) from None
        assert self._served is not None and self._reading is not None and self._limit is not None  # noqa: S101
        return EngineIdentity(
            engine="openai_compat",
            model=self._served.description,
            tokenizer=tokenizer_digest(token_ids),
            context_tokens=self._limit,
            notes=trial,
        )

    async def probe(self) -> None:
        answer = await self._http.ask("GET", "/health", None, SMALL_BYTES, self._control_timeout_s)
        if answer.status == 404:
            answer = await self._http.ask("GET", "/v1/models", None, INFO_BYTES, self._control_timeout_s)
        if answer.status != 200:
            raise await self._refusal(answer, ())

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _learn(self) -> tuple[str, ...]:
        """Model, context length and way of reading, by a trial; gives notes for the operator."""
        served = wire.read_model((await self._ask("GET", "/v1/models", None, INFO_BYTES)).body, self._named)
        self._served = served
        length = await self._slot_length() or served.context_length
        if length is None:
            raise ConfigError("the server states no context length, in /v1/models or /props")
        self._limit = length - 1  # one token is generated
        labels = trial_labels(await self.tokenize(TRIAL_TEXTS))
        position, reading = await self._try_ids(labels), Reading("ids", 0)
        if position is None:
            position, reading = await self._try_tops()
        # Not where likely tokens were asked for, but the letters are not among them.
        shown = [value for label, value in position.logprobs.items() if reading.way == "top" or label in labels]
        notes = grid_note(sorted(shown, reverse=True)[:16], "float32 weights remove it") if len(shown) >= 8 else ()
        if reading.way == "top":
            notes += (
                f"the server returns its {reading.top} likeliest tokens only: labels beyond them are unknown, and "
                "tickets that they could decide go to people (label_not_returned)",
            )
        if await self._shows_bias(position, reading):
            self._served = replace(served, description=f"{served.description} logprobs=processed")
            notes += (
                "the server reports log-probabilities after its sampler's changes (vLLM: --logprobs-mode "
                "processed_logprobs): penalties in its generation config change scores; run it with raw_logprobs",
            )
        self._reading = reading
        return notes

    async def _slot_length(self) -> int | None:
        """llama.cpp shares its context among slots, and one slot's share is what a prompt gets."""
        answer = await self._http.ask("GET", "/props", None, INFO_BYTES, self._control_timeout_s)
        if answer.status != 200:
            return None
        settings = decoded(answer.body).get("default_generation_settings")
        length = settings.get("n_ctx") if isinstance(settings, dict) else None
        return length if type(length) is int and length > 1 else None

    async def _try_ids(self, labels: tuple[int, ...]) -> wire.Position | None:
        """None where the server does not take label ids, or takes them and returns something else."""
        try:
            (position,) = await self._positions([TRIAL_PROMPT], 1, labels)
        except RequestRefused:
            return None
        return position if all(label in position.logprobs for label in labels) else None

    async def _try_tops(self) -> tuple[wire.Position, Reading]:
        """Asks for ever fewer likeliest tokens, until it gets some. Raises RequestRefused."""
        assert self._served is not None  # noqa: S101
        tops = list(TOPS)
        while True:
            asked = tops.pop(0)
            body = encoded(wire.completion_body(self._served.name, [TRIAL_PROMPT], top=asked))
            limit = wire.completion_bytes(1, asked)
            answer = await self._http.ask("POST", "/v1/completions", body, limit, self._timeout_s)
            if answer.status == 400 and tops:
                cap = wire.read_cap(answer.body)
                if cap is not None and 0 < cap < asked:
                    tops = [cap, *(top for top in tops if top < cap)]
                continue
            if answer.status != 200:
                raise await self._refusal(answer, ())
            (position,) = wire.read_positions(answer.body, 1)
            return position, Reading("top", min(asked, len(position.logprobs)))

    async def _shows_bias(self, before: wire.Position, reading: Reading) -> bool:
        """Whether a bias on the likeliest token's runner-up shows in the values."""
        if len(before.logprobs) < 2:
            return False
        first, second, *_ = sorted(before.logprobs, key=before.logprobs.__getitem__, reverse=True)
        try:
            ids = (first, second) if reading.way == "ids" else ()
            (after,) = await self._positions([TRIAL_PROMPT], max(reading.top, 1), ids, {second: BIAS})
        except RequestRefused:
            return False
        if first not in after.logprobs or second not in after.logprobs:
            return True
        moved = (after.logprobs[second] - after.logprobs[first]) - (before.logprobs[second] - before.logprobs[first])
        return moved > BIAS / 2

    async def _check_too_long(self, token_ids: Sequence[int]) -> None:
        """Once. Raises ConfigError where a prompt that does not fit is answered: what was cut off is the answer cue."""
        if self._refuses_too_long:
            return
        assert self._limit is not None  # noqa: S101
        too_long = (token_ids[0], *(token_ids[-1],) * (self._limit + 16))
        try:
            await self._positions([too_long], 1)
        except (RequestRefused, TooLong):
            self._refuses_too_long = True
        else:
            raise ConfigError("the server answers a prompt longer than its context: it must refuse that, not cut it")

    async def _positions(
        self, prompts: Sequence[Piece], top: int, label_ids: Sequence[int] = (), bias: dict[int, float] | None = None
    ) -> list[wire.Position]:
        assert self._served is not None  # noqa: S101
        body = encoded(wire.completion_body(self._served.name, prompts, top=top, label_ids=label_ids, bias=bias))
        limit = wire.completion_bytes(len(prompts), max(top, len(label_ids)))
        answer = await self._http.ask("POST", "/v1/completions", body, limit, self._timeout_s)
        if answer.status != 200:
            raise await self._refusal(answer, prompts)
        return wire.read_positions(answer.body, len(prompts))

    async def _ask(self, method: str, path: str, body: bytes | None, limit: int) -> Answer:
        answer = await self._http.ask(method, path, body, limit, self._control_timeout_s)
        if answer.status != 200:
            raise await self._refusal(answer, ())
        return answer

    async def _refusal(self, answer: Answer, prompts: Sequence[Piece]) -> EngineError | TooLong:
        if answer.status == 404 and "model" in wire.error_message(answer.body):
            return Misconfigured("the server does not serve the model asked for (HTTP 404): set ROUTER_ENGINE_MODEL")
        failure = self._http.failure(answer)
        if failure is not None:
            return failure
        if len(prompts) == 1 and (too_long := await self._too_long(prompts[0])) is not None:
            return too_long
        reason = wire.refusal_reason(answer.body)
        many = f"one of {len(prompts)} prompts: " if len(prompts) > 1 else ""
        return RequestRefused(
            f"{SERVER.name} refuses the request (HTTP {answer.status}, {many}{reason})", answer.status
        )

    async def _too_long(self, prompt: Piece) -> TooLong | None:
        """Whether a refused prompt is longer than what fits. Counted here, since servers word it in many ways and vLLM
        counts no further than its limit."""
        if self._limit is None:
            return None
        try:
            count = len((await self.tokenize([prompt]))[0]) if isinstance(prompt, str) else len(prompt)
        except (RequestRefused, InvalidAnswer):
            return None
        return TooLong(count, self._limit) if count > self._limit else None
