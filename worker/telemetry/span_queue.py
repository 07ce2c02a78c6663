"""SpanQueue: alone knows how many ended spans wait for their export, and how many there was no room for.

OpenTelemetry's SDK 1.38 to 1.45 drops spans from a full queue and tells nobody but its log. Loaded only where spans
leave the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

MOST_WAITING: Final = 2_048
"""As many as the SDK's own by default."""


class SpanQueue(BatchSpanProcessor):
    """The SDK's processor, to which no more is handed than its queue takes; `left_out` may be read from any thread."""

    def __init__(self, exporter: SpanExporter, most: int) -> None:
        """Starts the SDK's thread. `most` wait at once, a batch that is just being exported aside."""
        self.left_out = 0
        self._most = most
        self._waiting = 0
        self._counting = threading.Lock()
        super().__init__(_Taking(exporter, self._taken), max_queue_size=most)

    def on_end(self, span: ReadableSpan) -> None:
        with self._counting:
            if self._waiting >= self._most:
                self.left_out += 1
                return
            self._waiting += 1
        super().on_end(span)

    def _taken(self, count: int) -> None:
        with self._counting:
            self._waiting -= count


class _Taking(SpanExporter):
    """Says of each batch that it has left the queue, before it is exported."""

    def __init__(self, exporter: SpanExporter, taken: Callable[[int], None]) -> None:
        self._exporter = exporter
        self._taken = taken

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._taken(len(spans))
        return self._exporter.export(spans)

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)
