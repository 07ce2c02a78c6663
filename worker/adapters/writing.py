"""How an OpenAI-compatible server is made to write an answer: a word, JSON by a schema, or thoughts and then a word.

For comparisons only. What is written has no probability, so this is no ScoringEngine and can never be one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, assert_never

from worker.adapters.http_exchange import INFO_BYTES, Answer, HttpExchange, Server, decoded, encoded
from worker.adapters.openai_wire import read_model, refusal_reason
from worker.errors import EngineError, InvalidAnswer, RequestRefused

Way = Literal["word", "json", "thinking"]
WAYS: tuple[Way, ...] = ("word", "json", "thinking")

SERVER = Server(
    name="the OpenAI-compatible server",
    key="set ROUTER_ENGINE_API_KEY to the one that the server was given",
    address="the base URL must lead to a server with /v1/models, /v1/completions and /v1/chat/completions",
)
WORD_TOKENS, JSON_TOKENS = 8, 64
BYTES_A_TOKEN = 64
"""Far above what a token of text takes, escaped and counted twice."""


@dataclass(frozen=True, slots=True)
class Written:
    """What came back, with the number of tokens that it took, as the server counts them."""

    text: str
    tokens: int


class WritingClient:
    """One server, asked at temperature 0. Raises as SGLangEngine does."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        thinking_tokens: int = 1024,
        ca_file: Path | None = None,
    ) -> None:
        self._http = HttpExchange(
            base_url.rstrip("/").removesuffix("/v1"),
            SERVER,
            api_key=api_key,
            connections=4,
            connect_timeout_s=3.0,
            ca_file=ca_file,
        )
        self._named = model
        self._model: str | None = None
        self._timeout_s = timeout_s
        self._thinking_tokens = thinking_tokens

    async def write(self, prompt: str, words: Sequence[str], way: Way) -> Written:
        """`prompt` ends with the answer cue. `json` and `thinking` are put to the model as a message of a user."""
        if self._model is None:
            models = await self._http.ask("GET", "/v1/models", None, INFO_BYTES, self._timeout_s)
            if models.status != 200:
                raise _refusal(self._http, models)
            self._model = read_model(models.body, self._named).name
        match way:
            case "word":
                asked: dict[str, Any] = {"prompt": prompt, "max_tokens": WORD_TOKENS, "stop": ["\n"]}
            case "json":
                asked = {**_message(prompt, words, ""), "max_tokens": JSON_TOKENS, "response_format": _schema(words)}
                asked["chat_template_kwargs"] = {"enable_thinking": False}
            case "thinking":
                think = " Think step by step first. Then write a last line: 'Answer: ' and the word."
                asked = {**_message(prompt, words, think), "max_tokens": self._thinking_tokens}
                asked["chat_template_kwargs"] = {"enable_thinking": True}
            case _:
                assert_never(way)
        path = "/v1/completions" if way == "word" else "/v1/chat/completions"
        body = encoded({"model": self._model, "temperature": 0, **asked})
        answer = await self._http.ask("POST", path, body, INFO_BYTES + BYTES_A_TOKEN * len(body), self._timeout_s)
        if answer.status != 200:
            raise _refusal(self._http, answer)
        return _read(answer.body)

    async def aclose(self) -> None:
        await self._http.aclose()


def _message(prompt: str, words: Sequence[str], more: str) -> dict[str, Any]:
    task = f"Answer with one of these words only: {', '.join(words)}.{more}"
    return {"messages": [{"role": "user", "content": f"{prompt}\n\n{task}"}]}


def _schema(words: Sequence[str]) -> dict[str, Any]:
    properties = {"answer": {"type": "string", "enum": list(words)}}
    schema = {"type": "object", "properties": properties, "required": ["answer"], "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def _read(body: bytes) -> Written:
    found = decoded(body)
    choices = found.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        raise InvalidAnswer("the answer holds nothing that was written")
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    usage = found.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    # A thought that took all tokens leaves no content: nothing was answered, which is an answer to count.
    return Written(text if isinstance(text, str) else "", tokens if type(tokens) is int else 0)


def _refusal(http: HttpExchange, answer: Answer) -> EngineError:
    failure = http.failure(answer)
    if failure is not None:
        return failure
    reason = refusal_reason(answer.body)
    return RequestRefused(f"{SERVER.name} refuses the request (HTTP {answer.status}, {reason})", answer.status)
