"""A server that answers as recorded: it knows exchanges by method, path and JSON body, and nothing else.

With an upstream it records: it forwards what it does not know yet and keeps the exchange. How the recordings under
tests/contracts/engine_recordings were made:

    SGLANG_TEST_URL=http://127.0.0.1:30000 ROUTER_TEST_RECORD=1 pytest -m sglang tests/contracts/test_engine.py
    VLLM_TEST_URL=http://127.0.0.1:8000 ROUTER_TEST_RECORD=1 pytest -m vllm tests/contracts/test_engine.py
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx

from tests.servers.stub_engine import read_body, read_head, respond

LONGEST_REQUEST = 4096
"""Longer bodies are recorded by their digest only."""
KEPT = {
    "/model_info": "model_path served_model_name is_generation weight_version model_type architectures",
    "/server_info": "version allow_auto_truncate dtype quantization kv_cache_dtype enable_fp32_lm_head revision "
    "model_checksum context_length max_req_input_len",
}
"""Of these answers only the named fields are recorded, since the rest is long and about the machine."""


class ReplayServer:
    def __init__(self, recording: Path, upstream: str | None = None) -> None:
        self._path = recording
        self._upstream = None if upstream is None else httpx.AsyncClient(base_url=upstream, timeout=300)
        known = json.loads(recording.read_text())["exchanges"] if upstream is None else []
        self._exchanges: dict[tuple[str, str, str], dict[str, Any]] = {
            (exchange["method"], exchange["path"], request_digest(exchange["request"])): exchange for exchange in known
        }
        self.unknown: list[str] = []
        """Requests that were not recorded, for a test to name."""

    async def __aenter__(self) -> ReplayServer:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=2**24)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        if self._upstream is not None:
            await self._upstream.aclose()
            self._path.write_text(self.recorded())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def recorded(self) -> str:
        """One exchange a line."""
        lines = ",\n".join(json.dumps(exchange, ensure_ascii=False) for exchange in self._exchanges.values())
        return f'{{"exchanges": [\n{lines}\n]}}\n'

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                method, path, headers = await read_head(reader)
                body = await read_body(reader, headers)
                exchange = await self._exchange(method, path, json.loads(body or b"null"))
                await respond(writer, exchange["status"], json.dumps(exchange["answer"]).encode())
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _exchange(self, method: str, path: str, request: Any) -> dict[str, Any]:
        key = (method, path, request_digest(request))
        if key not in self._exchanges:
            if self._upstream is None:
                self.unknown.append(f"{method} {path} {json.dumps(request)[:200]}")
                return {"status": 418, "answer": {"message": "not recorded"}}
            response = await self._upstream.request(method, path, json=request)
            answer = response.json() if response.content else None
            if path in KEPT:
                answer = {name: answer[name] for name in KEPT[path].split()}
            if len(json.dumps(request)) > LONGEST_REQUEST:
                request = {"sha256": key[2]}
            kept = {
                "method": method,
                "path": path,
                "request": request,
                "status": response.status_code,
                "answer": answer,
            }
            self._exchanges[key] = kept
        return self._exchanges[key]


def request_digest(request: Any) -> str:
    if isinstance(request, dict) and set(request) == {"sha256"}:
        return str(request["sha256"])
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
