"""A stub SGLang server that scores from the text alone and misbehaves on demand.

In a test:      async with StubEngine() as stub: stub.behaviour.fault = "reset"; ... stub.counters.requests
As a process:   python -m tests.servers.stub_engine --port 30001 [--fault slow_loris] [--keywords '{"refund": " C"}']
                GET /_stub tells counters and behaviour, POST /_stub {"fault": "status", "status": 429} changes it.

It speaks HTTP/1.1 on asyncio streams by hand, since no server framework can be told to break the protocol.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gzip
import json
import math
import re
import signal
import socket
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

BOS = 2
VOCABULARY = 262_144
PIECE = re.compile(r" ?\w+|\s|[^\w\s]")
MIB = 1024 * 1024


def tokenize(text: str, *, add_bos: bool = True) -> list[int]:
    """Words with the space before them, and single other characters, are one token each. Pieces of one or two ASCII
    characters have ids of their own, others are hashed."""
    return [BOS] * add_bos + [token_id(piece) for piece in PIECE.findall(text)]


def token_id(piece: str) -> int:
    if len(piece) <= 2 and piece.isascii():
        return 300 + sum(ord(character) << 7 * place for place, character in enumerate(reversed(piece)))
    return 20_000 + zlib.crc32(piece.encode()) % (VOCABULARY - 20_000)


def label_logprobs(
    text: str, labels: Sequence[int], keywords: Mapping[str, str], mass: float, strength: float
) -> list[float]:
    """Pseudo-random by text and label, raised by `strength` nats for the label that the text's last keyword stands
    for; the labels together hold `mass`."""
    logits = [zlib.crc32(f"{label}|{text}".encode()) / 2**32 for label in labels]
    found = max(((text.rfind(word), label) for word, label in keywords.items()), default=(-1, ""))
    if found[0] >= 0 and (label := token_id(found[1])) in labels:
        logits[list(labels).index(label)] += strength
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total + math.log(mass) for logit in logits]


@dataclass
class Behaviour:
    """All of it may be changed while the server runs."""

    fault: str = "none"
    """A name in FAULTS."""
    share: float = 1.0
    """Of the scoring requests, evenly spread, that the fault befalls."""
    times: int | None = None
    """How many more scoring requests the fault befalls at most."""
    status: int = 500
    retry_after: str | None = None
    canned: dict[str, Any] | None = None
    """For the fault "canned": {"status": 400, "answer": JSON or text}."""
    latency_s: float = 0.0
    latency_per_item_s: float = 0.0
    capacity: int | None = None
    """Scoring requests at once; more are answered 503 with the real server's words."""
    slots: int | None = None
    """Scoring requests that are worked on at once; more wait for their turn, as at an engine that is saturated."""
    quick: bool = False
    """Four characters of a long text that is counted alone are a token, and prompts are not counted at all: for
    measuring whoever asks."""
    timed: bool = False
    """Each answered scoring request's time is kept."""
    poison: str | None = None
    """Text whose request gets its connection closed without an answer."""
    poison_outage_s: float | None = None
    """The poison ends the whole server, which is back after so long: all connections end, and nobody listens."""
    refused: str | None = None
    """Text whose request gets a 400 that quotes it and a path."""
    counted: str | None = None
    """Text whose scored items are counted by themselves."""
    slow: str | None = None
    """Text whose request is never answered, while others are."""
    context_tokens: int = 4089
    api_key: str | None = None
    token_logprobs: bool = True
    """False: as before 0.5.21, the field is not known."""
    ready: bool = True
    has_ready: bool = True
    """False: as an older server, without /ready, /model_info and /server_info (but with their older names)."""
    auto_truncate: bool = False
    hides_auto_truncate: bool = False
    """The server's information does not name it, as behind a gateway."""
    states_vocabulary: bool = True
    keywords: dict[str, str] = field(default_factory=dict)
    """Word in a ticket -> label token, such as {"refund": " C"}."""
    mass: float = 0.9
    strength: float = 3.0


@dataclass
class Counters:
    connections: int = 0
    requests: int = 0
    """Scoring requests that arrived, whatever became of them."""
    items: int = 0
    counted: int = 0
    answered: int = 0
    faults: int = 0
    deaths: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    starved_s: float = 0.0
    """So long there were fewer scoring requests than `slots`."""
    paths: Counter[str] = field(default_factory=Counter)
    items_per_request: list[int] = field(default_factory=list)
    taken_s: list[float] = field(default_factory=list)
    """Of each scoring request that was answered while the behaviour is `timed`, with the wait for its turn."""


def spoil_tables(spoil: Callable[[list[list[Any]]], object]) -> Callable[[dict[str, Any]], bytes]:
    """A fault inside an otherwise fine answer; it befalls both tables."""

    def body(answer: dict[str, Any]) -> bytes:
        for name in ("scores", "token_logprobs"):
            if answer[name] is not None:
                spoil(answer[name])
        return json.dumps(answer).encode()

    return body


def set_last(value: Any) -> Callable[[list[list[Any]]], object]:
    return lambda table: table[-1].__setitem__(-1, value)


def set_all(value: Any) -> Callable[[list[list[Any]]], object]:
    return lambda table: [row.__setitem__(slice(None), [value] * len(row)) for row in table]


BAD_BODIES: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "garbage_body": lambda _: b"\xff\xfe\x00 not json at all",
    "html": lambda _: b"<html><body><h1>200 OK</h1></body></html>",
    "empty": lambda _: b"",
    "json_null": lambda _: b"null",
    "json_list": lambda _: b"[[0.1, 0.2]]",
    "deep_json": lambda _: b"[" * 60_000,
    "error_object": lambda _: b'{"object": "error", "message": "no", "code": 500}',
    "huge": lambda answer: json.dumps(answer).encode() + b" " * 64 * MIB,
    "nan": spoil_tables(set_last(math.nan)),
    "infinite": lambda answer: spoil_tables(set_last(-12345.5))(answer).replace(b"-12345.5", b"-1e999"),
    "null": spoil_tables(set_last(None)),
    "text": spoil_tables(set_last("-0.1")),
    "boolean": spoil_tables(set_last(True)),
    "negative": lambda answer: spoil_tables(set_last(-0.25))({**answer, "token_logprobs": None}),
    "above_one": spoil_tables(set_last(1.5)),
    "all_zero": spoil_tables(set_all(0.0)),
    "mass_above_one": spoil_tables(set_all(-0.01)),
    "missing_row": spoil_tables(lambda table: table.pop()),
    "extra_row": spoil_tables(lambda table: table.append(table[-1])),
    "missing_label": spoil_tables(lambda table: table[-1].pop()),
    "extra_label": spoil_tables(lambda table: table[-1].append(table[-1][-1])),
    "flat_rows": lambda answer: json.dumps({**answer, "token_logprobs": [-1.0, -2.0]}).encode(),
    "swapped_rows": spoil_tables(lambda table: table.reverse()),  # nothing in the answer shows it
}
BAD_TRANSPORT = (
    "hang",  # the request is read, and then nothing
    "hang_unread",  # the request is not even read
    "half_answer",  # headers and half a body, then nothing
    "slow_loris",  # a byte every 0.1 s
    "slow_headers",  # the same, of the headers
    "close",  # without an answer
    "reset",  # the same, by RST
    "truncated",  # closed in mid-body
    "reset_in_body",
    "content_length_long",  # says more bytes than it sends, and closes
    "content_length_short",  # says fewer
    "redirect",
    "not_http",
    "gzip_bomb",
)
FAULTS = ("none", "status", "canned", *BAD_TRANSPORT, *BAD_BODIES)


class StubEngine:
    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.counters = Counters()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._revival: asyncio.Task[None] | None = None
        self._arrived = 0.0
        self._slots: tuple[int, asyncio.Semaphore] | None = None
        self._noted_at = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> StubEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._revival is not None:
            self._revival.cancel()
        await self.stop()

    async def start(self, port: int = 0) -> None:
        self._stopping.clear()
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", port or self.port, limit=16 * MIB)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As by kill: open connections end. The same port is taken again by `start`."""
        self._stopping.set()
        if self._server is not None:
            self._server.close()
        for task in tuple(self._connections):
            task.cancel()
        while self._connections:
            await asyncio.wait(self._connections)

    async def _die(self, outage_s: float) -> None:
        self.counters.deaths += 1
        await self.stop()
        await asyncio.sleep(outage_s)
        self._revival = None
        await self.start()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self.counters.connections += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort() if self._stopping.is_set() else writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; False when the connection is over."""
        method, path, headers = await read_head(reader)
        self.counters.paths[path] += 1
        if path == "/v1/score" and self.behaviour.fault == "hang_unread" and self._befalls():
            await asyncio.sleep(3600)
        body = await read_body(reader, headers)
        if path == "/v1/score" and method == "POST":
            return await self._score(body, headers, writer)
        status, answer = self._control(method, path, body, headers)
        await respond(writer, status, b"" if answer is None else json.dumps(answer).encode())
        return True

    def _control(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, Any]:
        behaviour = self.behaviour
        if path == "/_stub":
            for name, value in json.loads(body or b"{}").items():
                if not hasattr(behaviour, name):
                    return 400, error(f"no such behaviour: {name}")
                setattr(behaviour, name, value)
            return 200, {"behaviour": asdict(behaviour), "counters": {**vars(self.counters)}}
        if path in ("/ready", "/health"):
            if path == "/ready" and not behaviour.has_ready:
                return 404, {"detail": "Not Found"}
            return (200 if behaviour.ready else 503), None
        if not self._authorised(headers):
            return 401, {"error": "Unauthorized"}
        newer, older = ("model_info", "server_info"), ("get_model_info", "get_server_info")
        known = (newer + older if behaviour.has_ready else older) if path.count("/") == 1 else ()
        if path[1:] in known and path.endswith("model_info"):
            return 200, {
                "model_path": "/srv/models/stub",
                "served_model_name": "stub",
                "is_generation": True,
                "weight_version": "default",
            }
        if path[1:] in known:
            return 200, {
                **({} if behaviour.hides_auto_truncate else {"allow_auto_truncate": behaviour.auto_truncate}),
                "dtype": "float32",
                "max_req_input_len": behaviour.context_tokens + 1,
                "version": "stub",
            }
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "stub", "max_model_len": behaviour.context_tokens + 7}]}
        if path == "/tokenize" and method == "POST":
            prompt = json.loads(body)["prompt"]
            if isinstance(prompt, list):
                by_length = behaviour.quick and len(prompt) == 1 and len(prompt[0]) > 1_000
                rows = [list(range(len(text) // 4)) if by_length else tokenize(text) for text in prompt]
                return 200, {"tokens": rows, "count": [len(row) for row in rows]}
            return 200, {"tokens": tokenize(prompt), "count": len(tokenize(prompt))}
        return 404, {"detail": "Not Found"}

    def _authorised(self, headers: Mapping[str, str]) -> bool:
        key = self.behaviour.api_key
        return key is None or headers.get("authorization") == f"Bearer {key}"

    def _befalls(self) -> bool:
        """Whether the fault befalls this scoring request: evenly spread by `share`, at most `times`."""
        behaviour = self.behaviour
        self._arrived += behaviour.share
        if self._arrived < 1.0 - 1e-9 or behaviour.times == 0:
            return False
        self._arrived -= 1.0
        if behaviour.times is not None:
            behaviour.times -= 1
        self.counters.faults += 1
        return True

    async def _score(self, body: bytes, headers: Mapping[str, str], writer: asyncio.StreamWriter) -> bool:
        behaviour, counters = self.behaviour, self.counters
        if not self._authorised(headers):
            await respond(writer, 401, json.dumps({"error": "Unauthorized"}).encode())
            return True
        request = json.loads(body)
        prefix, items = request["query"], request["items"]
        counters.requests += 1
        counters.items += len(items)
        if behaviour.counted is not None:
            counters.counted += sum(behaviour.counted in item for item in items if isinstance(item, str))
        counters.items_per_request.append(len(items))
        if behaviour.capacity is not None and counters.in_flight >= behaviour.capacity:
            extra = () if behaviour.retry_after is None else (("Retry-After", behaviour.retry_after),)
            await respond(writer, 503, json.dumps(error("The request queue is full.", 503)).encode(), extra)
            return True
        self._note(1)
        came_at = self._noted_at
        counters.most_in_flight = max(counters.most_in_flight, counters.in_flight)
        try:
            async with self._turn():
                await asyncio.sleep(behaviour.latency_s + behaviour.latency_per_item_s * len(items))
            if behaviour.fault not in ("none", "hang_unread") and self._befalls():
                return await self._misbehave(request, writer)
            if behaviour.poison is not None and any(behaviour.poison in item for item in items):
                if behaviour.poison_outage_s is not None and self._revival is None:
                    self._revival = asyncio.create_task(self._die(behaviour.poison_outage_s))
                return False
            if behaviour.slow is not None and any(behaviour.slow in item for item in items):
                await asyncio.sleep(3_600)
            status, answer = self._answer(prefix, items, request)
            await respond(writer, status, json.dumps(answer).encode())
            counters.answered += status == 200
            if behaviour.timed:
                counters.taken_s.append(asyncio.get_running_loop().time() - came_at)
            return True
        finally:
            self._note(-1)

    def _note(self, change: int) -> None:
        """A scoring request came or went."""
        now = asyncio.get_running_loop().time()
        if self.counters.in_flight < (self.behaviour.slots or 0):
            self.counters.starved_s += now - self._noted_at
        self._noted_at = now
        self.counters.in_flight += change

    def _turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        slots = self.behaviour.slots
        if slots is None:
            return contextlib.nullcontext()
        if self._slots is None or self._slots[0] != slots:
            self._slots = slots, asyncio.Semaphore(slots)
        return self._slots[1]

    def _answer(self, prefix: str, items: Sequence[str], request: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        behaviour = self.behaviour
        labels = request["label_token_ids"]
        if behaviour.refused is not None and (bad := [item for item in items if behaviour.refused in item]):
            message = f'1 validation error: {bad[0]} File "/srv/sglang/http_server.py", line 1'
            return 400, error(message, 400, "Bad Request")
        if any(label >= VOCABULARY for label in labels):
            stated = f" (vocab size: {VOCABULARY})" if behaviour.states_vocabulary else ""
            return 400, error(f"Token ID {max(labels)} is out of vocabulary{stated}")
        counts = [0] * len(items)
        if not behaviour.quick:
            counts = [len(tokenize(prefix + item) if isinstance(item, str) else prefix + item) for item in items]
        items = [item if isinstance(item, str) else f"ids {item}" for item in items]
        longest = max(counts, default=0)
        if longest > behaviour.context_tokens and not behaviour.auto_truncate:
            limit = f"the maximum allowed length ({behaviour.context_tokens + 1} tokens)"
            return 400, error(f"Input length ({longest} tokens) exceeds {limit}.")
        table = [label_logprobs(item, labels, behaviour.keywords, behaviour.mass, behaviour.strength) for item in items]
        scores = [[math.exp(value) for value in row] for row in table]
        if request.get("apply_softmax"):
            scores = [[value / sum(row) for value in row] for row in scores]
        answer: dict[str, Any] = {"scores": scores, "token_logprobs": None, "model": "default", "object": "scoring"}
        if behaviour.token_logprobs and request.get("return_token_logprobs"):
            answer["token_logprobs"] = table
        answer["usage"] = {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}
        return 200, answer

    async def _misbehave(self, request: Mapping[str, Any], writer: asyncio.StreamWriter) -> bool:
        behaviour, fault = self.behaviour, self.behaviour.fault
        answer = self._answer(request["query"], request["items"], request)[1]
        body = json.dumps(answer).encode()
        if fault == "status":
            extra = () if behaviour.retry_after is None else (("Retry-After", behaviour.retry_after),)
            await respond(writer, behaviour.status, json.dumps(error("stub", behaviour.status)).encode(), extra)
            return True
        if fault == "canned":
            assert behaviour.canned is not None
            canned = behaviour.canned["answer"]
            body = canned.encode() if isinstance(canned, str) else json.dumps(canned).encode()
            await respond(writer, behaviour.canned["status"], body)
            return True
        if fault in BAD_BODIES:
            await respond(writer, 200, BAD_BODIES[fault](answer))
            return True
        if fault == "redirect":
            await respond(writer, 307, b"", (("Location", f"{self.url}/v1/score?followed"),))
            return True
        if fault == "gzip_bomb":
            await respond(writer, 200, gzip_bomb(), (("Content-Encoding", "gzip"),))
            return True
        if fault == "not_http":
            writer.write(b"SSH-2.0-OpenSSH_9.6\r\n" * 20)
            await writer.drain()
            return False
        head = head_of(200, len(body))
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault in ("slow_loris", "slow_headers"):
            data = head + body
            if fault == "slow_loris":
                writer.write(head)
                data = body
            for byte in data:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.1)
        if fault in ("half_answer", "truncated", "reset_in_body"):
            writer.write(head + body[: len(body) // 2])
            await writer.drain()
            if fault == "half_answer":
                await asyncio.sleep(3600)
        if fault in ("reset", "reset_in_body"):
            await asyncio.sleep(0.05)  # what was written goes out first
            reset(writer)
        if fault == "content_length_long":
            writer.write(head_of(200, len(body) + 1000) + body)
            await writer.drain()
        if fault == "content_length_short":
            writer.write(head_of(200, len(body) - 20) + body)
            await writer.drain()
        return False


async def read_head(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str]]:
    """Method, path and headers of the next request, names in lower case."""
    request_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = request_line.split(" ")
    return method, path, {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


async def read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    return await reader.readexactly(int(headers.get("content-length", "0")))


def error(message: str, code: int = 400, kind: str = "BadRequestError") -> dict[str, Any]:
    return {"object": "error", "message": message, "type": kind, "param": None, "code": code}


def head_of(status: int, length: int, extra: Sequence[tuple[str, str]] = ()) -> bytes:
    lines = [f"HTTP/1.1 {status} Stub", f"content-length: {length}", "content-type: application/json", "server: stub"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in extra), "", ""]).encode("latin-1")


async def respond(
    writer: asyncio.StreamWriter, status: int, body: bytes, extra: Sequence[tuple[str, str]] = ()
) -> None:
    writer.write(head_of(status, len(body), extra))
    for start in range(0, len(body), MIB):
        writer.write(body[start : start + MIB])
        await writer.drain()
    await writer.drain()


def reset(writer: asyncio.StreamWriter) -> None:
    """RST instead of FIN."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@functools.cache
def gzip_bomb() -> bytes:
    """About 200 KB that unfold into 200 MiB."""
    return gzip.compress(b"\0" * 200 * MIB, compresslevel=9)


async def serve(port: int, behaviour: Behaviour) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopped.set)
    stub = StubEngine(behaviour)
    await stub.start(port)
    print(stub.url, flush=True)
    await stopped.wait()
    await stub.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one; the URL is printed")
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--latency-s", type=float, default=0.0)
    parser.add_argument("--keywords", type=json.loads, default={}, help='JSON, such as {"refund": " C"}')
    parser.add_argument("--api-key")
    arguments = vars(parser.parse_args())
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(arguments.pop("port"), Behaviour(**arguments)))


if __name__ == "__main__":
    main()
