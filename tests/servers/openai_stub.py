"""A stub OpenAI-compatible server that scores from the text alone, in the dialect of vLLM or of llama.cpp.

    async with OpenAIStub() as stub: stub.takes_ids = False; ... stub.requests

The likeliest tokens behind a prompt are pseudo-random, of a vocabulary of 5,000, and sum to 1.
"""

from __future__ import annotations

import asyncio
import json
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from tests.servers.stub_engine import gzip_bomb, read_body, read_head, respond, tokenize

VOCABULARY = 5_000
KEY = "sk-stub"


def vocabulary_logprobs(prompt: str, bias: Mapping[int, float]) -> list[float]:
    logits = [8.0 * zlib.crc32(f"{token}|{prompt}".encode()) / 2**32 for token in range(VOCABULARY)]
    for token, value in bias.items():
        logits[token] += value
    total = math.log(math.fsum(map(math.exp, logits)))
    return [logit - total for logit in logits]


class OpenAIStub:
    """All of it may be changed while the server runs."""

    def __init__(self) -> None:
        self.takes_ids = True
        """`logprob_token_ids` is known; else it is ignored."""
        self.cap = 20
        """Likeliest tokens at most; more is a 400. 0: as many as are asked for."""
        self.chat_shape = False
        self.named_by = "id"
        """"text": tokens without ids."""
        self.processed = False
        """Values after the sampler's changes."""
        self.offset = 0.0
        """Added to every value: 9 makes logits of them."""
        self.sampled: int | None = None
        """The token that is sampled, in place of the likeliest."""
        self.models = ["stub"]
        self.context_length: int | None = 256
        self.truncates = False
        self.api_key: str | None = None
        self.spoil: Callable[[dict[str, Any]], object] = lambda answer: None
        """Changes a completion's JSON before it is sent."""
        self.fault: str | None = None
        self.requests: list[dict[str, Any]] = []
        """Completions asked for."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> OpenAIStub:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=2**24)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                method, path, headers = await read_head(reader)
                body = await read_body(reader, headers)
                if self.fault is not None and path == "/v1/completions":
                    await self._misbehave(writer)
                    return
                status, answer = self._answer(method, path, json.loads(body or b"null"), headers)
                await respond(writer, status, b"" if answer is None else json.dumps(answer).encode())
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _misbehave(self, writer: asyncio.StreamWriter) -> None:
        if self.fault == "hang":
            await asyncio.sleep(3600)
        if self.fault == "gzip_bomb":
            await respond(writer, 200, gzip_bomb(), (("Content-Encoding", "gzip"),))
        if self.fault == "huge":
            await respond(writer, 200, b" " * 2**25)
        if self.fault == "redirect":
            await respond(writer, 307, b"", (("Location", f"{self.url}/elsewhere"),))
        if self.fault == "overloaded":
            await respond(writer, 429, b"{}", (("Retry-After", "7"),))

    def _answer(self, method: str, path: str, request: Any, headers: Mapping[str, str]) -> tuple[int, Any]:
        if path == "/health":
            return 200, None
        if self.api_key is not None and headers.get("authorization") != f"Bearer {self.api_key}":
            return 401, {"error": "Unauthorized"}
        if path == "/v1/models":
            return 200, {"data": [{"id": name, "max_model_len": self.context_length} for name in self.models]}
        if path == "/tokenize":
            return 200, {"tokens": tokenize(request["prompt"])}
        if path == "/v1/completions":
            self.requests.append(request)
            return self._complete(request)
        return 404, {"detail": "Not Found"}

    def _complete(self, request: Mapping[str, Any]) -> tuple[int, Any]:
        top, ids = request["logprobs"], request.get("logprob_token_ids") if self.takes_ids else None
        if request["model"] not in self.models:
            return 404, refusal(f"The model `{request['model']}` does not exist.")
        if self.cap and top > self.cap:
            return 400, refusal(f"Requested sample logprobs of {top}, which is greater than max allowed: {self.cap}")
        if ids is not None and len(ids) > 128:
            return 400, refusal(f"Requested logprob_token_ids of length {len(ids)}, greater than max allowed: 128")
        choices = []
        for index, prompt in enumerate(request["prompt"]):
            if (
                len(tokenize(prompt) if isinstance(prompt, str) else prompt) >= self.context_length
                and not self.truncates
            ):
                return 400, refusal("too many words")
            bias = {int(token): value for token, value in request.get("logit_bias", {}).items()}
            values = vocabulary_logprobs(str(prompt), bias if self.processed else {})
            likeliest = sorted(range(VOCABULARY), key=values.__getitem__, reverse=True)
            sampled = likeliest[0] if self.sampled is None else self.sampled
            shown = {token: values[token] for token in [sampled, *(likeliest[:top] if ids is None else ids)]}
            choices.append({"index": index, "text": "?", "logprobs": self._shaped(sampled, shown)})
        answer = {"choices": choices, "model": request["model"], "usage": {}}
        self.spoil(answer)
        return 200, answer

    def _shaped(self, sampled: int, shown: Mapping[int, float]) -> dict[str, Any]:
        name = (lambda token: f"token_id:{token}") if self.named_by == "id" else (lambda token: f" t{token}")
        if not self.chat_shape:
            stated = {name(token): value + self.offset for token, value in shown.items()}
            return {"tokens": [name(sampled)], "token_logprobs": [stated[name(sampled)]], "top_logprobs": [stated]}
        entries = [
            {"id": token, "token": f" t{token}", "logprob": value + self.offset} for token, value in shown.items()
        ]
        return {"content": [{**entries[0], "top_logprobs": entries}]}


def refusal(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
