"""How an SGLang server is asked over HTTP, and which of our errors each way of not answering is.

One `POST /v1/score` carries one shared prefix as `query` and the tickets as `items`; the server joins them as text
into one prompt an item. What the JSON means is known by `sglang_wire`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from worker.adapters import sglang_wire as wire
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
from worker.core.scores import LabelScores, ScoreRequest, check_batch
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
    name="the SGLang server",
    key="set ROUTER_ENGINE_API_KEY to the one given to its --api-key",
    address="the base URL must lead to SGLang itself, or through a plain load balancer (sglang-router 0.3.2 does not "
    "pass /v1/score on)",
)
NO_TOKEN = 2**31 - 1
"""A label that no vocabulary holds."""


class SGLangEngine:
    """A ScoringEngine on one SGLang server, 0.5.9 to 0.5.23."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        connections: int = 16,
        timeout_s: float = 30.0,
        connect_timeout_s: float = 3.0,
        control_timeout_s: float = 10.0,
        ca_file: Path | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Connects to nothing yet. Raises ConfigError on an address, a key or a `ca_file` that cannot be used.

        `timeout_s` bounds a scoring request from waiting for a connection to the answer's last byte,
        `control_timeout_s` any other one. `now` is Unix time, for a Retry-After that names a date.
        """
        self._http = HttpExchange(
            base_url,
            SERVER,
            api_key=api_key,
            connections=connections,
            connect_timeout_s=connect_timeout_s,
            ca_file=ca_file,
            now=now,
        )
        self._timeout_s = timeout_s
        self._control_timeout_s = control_timeout_s
        self._context_tokens: int | None = None
        self._vocabulary: int | None = None

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        if not requests:
            return ()
        check_batch(requests)
        if not isinstance(requests[0].prefix, str):
            await self._check_vocabulary(requests)
        items, labels = len(requests), len(requests[0].label_token_ids)
        limit = wire.score_answer_bytes(items, labels)
        body = wire.score_body(requests)
        answer = await self._http.ask("POST", "/v1/score", body, limit, self._timeout_s)
        if answer.status != 200:
            raise self._refusal(answer, items)
        return wire.read_scores(answer.body, items, labels)

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        body = encoded({"prompt": list(texts), "add_special_tokens": True})
        limit = SMALL_BYTES + 16 * len(body)  # a byte becomes at most one token, of at most 8 characters
        answer = await self._http.ask("POST", "/tokenize", body, limit, self._control_timeout_s)
        if answer.status != 200:
            raise self._refusal(answer, len(texts))
        return wire.read_token_ids(answer.body, len(texts))

    async def pieces(self, token_ids: Sequence[int]) -> list[str]:
        if not token_ids:
            return []
        body = wire.detokenize_body(token_ids)
        limit = SMALL_BYTES + 1024 * len(token_ids)
        answer = await self._http.ask("POST", "/detokenize", body, limit, self._control_timeout_s)
        if answer.status != 200:
            raise self._refusal(answer, 1)
        return wire.read_pieces(answer.body, len(token_ids))

    async def tokenize_turns(self, messages: Sequence[tuple[str, str]]) -> list[int] | None:
        body = wire.turns_body(messages)
        answer = await self._http.ask("POST", "/tokenize", body, SMALL_BYTES + 16 * len(body), self._control_timeout_s)
        if answer.status == 400:  # also where the server has no template
            return None
        if answer.status != 200:
            raise self._refusal(answer, 1)
        return wire.read_turns(answer.body)

    async def identity(self) -> EngineIdentity:
        try:
            model = await self._info("/model_info", "/get_model_info")
            models = await self._info("/v1/models")
            try:
                server = await self._info("/server_info", "/get_server_info")
            except Misconfigured:  # a gateway may hide it
                server = {}
            token_ids = await self.tokenize(PROBE_TEXTS)
            labels = trial_labels(await self.tokenize(TRIAL_TEXTS))
            trial = await self.score([ScoreRequest(TRIAL_PROMPT, "", labels)])
            self._context_tokens = wire.context_tokens(server, models)
            truncates = server.get("allow_auto_truncate")
            if truncates is None:
                truncates = await self._truncates(token_ids[0], labels)
        except Misconfigured as error:
            raise ConfigError(str(error)) from None
        except RequestRefused as error:
            raise ConfigError(f"a trial request failed: {error}; scoring needs a text model") from None
        except InvalidAnswer as error:
            raise ConfigError(f"what answers at the base URL is no SGLang server: {error}") from None
        except EngineDropped as error:
            raise EngineUnavailable(str(error)) from None
        if model.get("is_generation") is not True:
            raise ConfigError("the SGLang server runs no generation model, so it scores no next token")
        if truncates is True:
            raise ConfigError(
                "the SGLang server runs with --allow-auto-truncate, which silently cuts the end of a long prompt, "
                "where the answer cue is: start it without"
            )
        notes = grid_note(trial[0].logprobs, "SGLang's --enable-fp32-lm-head removes it")
        if truncates is None:
            notes += ("it is not known whether --allow-auto-truncate is off, as it must be",)
        return EngineIdentity(
            engine="sglang",
            model=wire.model_name(model, server),
            tokenizer=tokenizer_digest(token_ids),
            context_tokens=self._context_tokens,
            notes=notes,
        )

    async def probe(self) -> None:
        answer = await self._http.ask("GET", "/ready", None, SMALL_BYTES, self._control_timeout_s)
        if answer.status == 404:  # older; /health generates a token, which takes a second and more
            answer = await self._http.ask("GET", "/health", None, SMALL_BYTES, self._control_timeout_s)
        if answer.status != 200:
            raise self._refusal(answer, 1)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _truncates(self, token_ids: list[int], labels: tuple[int, ...]) -> bool | None:
        """Sends a prompt that is too long, where the server does not say what it does then. None: still unknown."""
        assert self._context_tokens is not None  # noqa: S101  (for the type checker)
        too_long = tuple(token_ids[-1:]) * (self._context_tokens + 2 * wire.RESERVED_TOKENS)
        try:
            await self.score([ScoreRequest(tuple(token_ids[:1]), too_long, labels)])
        except TooLong:
            return False
        except RequestRefused:
            return None
        return True

    async def _check_vocabulary(self, requests: Sequence[ScoreRequest]) -> None:
        """Raises RequestRefused on ids that are no tokens: SGLang 0.5.23 (CPU) ends at one."""
        if self._vocabulary is None:
            body = wire.score_body([ScoreRequest(TRIAL_PROMPT, "", (NO_TOKEN,))])
            answer = await self._http.ask("POST", "/v1/score", body, SMALL_BYTES, self._control_timeout_s)
            if (failure := self._http.failure(answer)) is not None:
                raise failure
            self._vocabulary = wire.read_vocabulary(answer.body)
        if self._vocabulary is None:
            raise RequestRefused("the SGLang server does not state its vocabulary, without which only text is sent")
        if any(isinstance(token, int) and token >= self._vocabulary for r in requests for token in r.prompt):
            raise RequestRefused("a token id of the prompt is outside the model's vocabulary")

    async def _info(self, path: str, older_path: str | None = None) -> dict[str, Any]:
        answer = await self._http.ask("GET", path, None, INFO_BYTES, self._control_timeout_s)
        if answer.status == 404 and older_path is not None:
            answer = await self._http.ask("GET", older_path, None, INFO_BYTES, self._control_timeout_s)
        if answer.status != 200:
            raise self._refusal(answer, 1)
        return decoded(answer.body)

    def _refusal(self, answer: Answer, prompts: int) -> EngineError | TooLong:
        failure = self._http.failure(answer)
        if failure is not None:
            return failure
        too_long = wire.read_too_long(answer.body, self._context_tokens)
        if too_long is not None and prompts == 1:
            return too_long
        reason = wire.refusal_reason(answer.body) if too_long is None else f"one of {prompts} prompts: {too_long}"
        return RequestRefused(f"the SGLang server refuses the request (HTTP {answer.status}, {reason})", answer.status)
