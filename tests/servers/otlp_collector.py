"""An OpenTelemetry collector that takes OTLP over HTTP and keeps what it got."""

from __future__ import annotations

import gzip
import http.server
import threading
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class OtlpCollector:
    """Listens inside the `with` block; `bodies` holds path and protobuf of every request."""

    def __init__(self) -> None:
        self.bodies: list[tuple[str, bytes]] = []
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"kept": self}))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def spans(self) -> list[Any]:
        """All spans so far, as protobuf."""
        requests = [ExportTraceServiceRequest.FromString(body) for path, body in self.bodies if path == "/v1/traces"]
        return [
            span
            for request in requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def __enter__(self) -> OtlpCollector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def said(span: Any) -> dict[str, Any]:
    """The attributes of a span."""
    return {
        item.key: getattr(item.value, item.value.WhichOneof("value"))
        for item in span.attributes
        if item.value.WhichOneof("value")
    }


class _Handler(http.server.BaseHTTPRequestHandler):
    kept: OtlpCollector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        packed = self.headers.get("content-encoding") == "gzip"
        self.kept.bodies.append((self.path, gzip.decompress(body) if packed else body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass
