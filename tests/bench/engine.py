"""Part (e): the same model asked to score, and asked to write its answer, by so many tickets at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import quantiles

from worker import wiring
from worker.adapters.files import SAMPLES_FILE, load_labelled
from worker.adapters.writing import Way
from worker.core.normalise import canonical
from worker.errors import EngineError
from worker.runtime.batcher import Batcher
from worker.settings import Settings
from worker.wiring import Desk

WAYS: tuple[Way, ...] = ("word", "json")
BATCH_WAIT_S = 0.005

Ask = Callable[[str], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Asked:
    """One way of asking with so many tickets at once."""

    way: str
    concurrency: int
    tickets: int
    per_second: float
    p50_ms: float
    p95_ms: float
    failed: int


async def run(settings: Settings, folder: Path, concurrencies: Sequence[int], seconds: float) -> list[Asked]:
    """On the rule set's own samples, each at most once in a run. Raises ConfigError, EngineError."""
    desk = Desk.load(folder)
    texts = [canonical(t.text) for t in load_labelled(folder / SAMPLES_FILE, desk.rule_set.categories.ids, None)]
    (_, engine), *_ = wiring.make_engines(settings)
    writer = None
    try:
        question = await wiring.ask_once(desk.rule_set, engine)
        primitive = question.primitive
        words = primitive.labels.words
        writer = await wiring.make_writer(settings, engine)
        rows = []
        for at_once in concurrencies:
            batcher = Batcher(engine.score, wiring.batch_items(settings), BATCH_WAIT_S, settings.batch_concurrency)

            async def score(text: str, batcher: Batcher = batcher) -> object:
                return await batcher.score(primitive.request(text))

            rows.append(await _closed_loop("scoring", score, texts, at_once, seconds))
            await batcher.aclose()
        for way in WAYS:
            for at_once in concurrencies:

                async def write(text: str, way: Way = way) -> object:
                    prompt = primitive.request(text).prompt
                    assert isinstance(prompt, str)
                    return await writer.write(prompt, words, way)

                rows.append(await _closed_loop(f"writing, {way}", write, texts, at_once, seconds))
        return rows
    finally:
        if writer is not None:
            await writer.aclose()
        await engine.aclose()


async def _closed_loop(way: str, ask: Ask, texts: Sequence[str], at_once: int, seconds: float) -> Asked:
    """Each of `at_once` asks again as soon as it has its answer; nobody begins after the time is over."""
    taken: list[float] = []
    failed = 0
    numbers = count()
    await ask(texts[-1])  # the prefix is read once, by whichever way
    began = time.monotonic()

    async def customer() -> None:
        nonlocal failed
        while time.monotonic() - began < seconds:
            text = f"{texts[next(numbers) % len(texts)]} "
            started = time.monotonic()
            try:
                await ask(text.strip())
            except EngineError:
                failed += 1
            taken.append(time.monotonic() - started)

    await asyncio.gather(*(customer() for _ in range(at_once)))
    spent = time.monotonic() - began
    cuts = quantiles(taken, n=20, method="inclusive") if len(taken) > 1 else [taken[0]] * 19
    return Asked(way, at_once, len(taken), len(taken) / spent, cuts[9] * 1e3, cuts[18] * 1e3, failed)
