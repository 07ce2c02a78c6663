"""What decides about tickets, wherever they come from: engines, batches, cache, router, and what has to be closed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Self

from worker.core.cache_key import ScoreKey
from worker.core.policy import Calibration, NoCalibration
from worker.core.steering import flagger_for
from worker.ports import ScoreCache
from worker.runtime.asking import Asker, Patience
from worker.runtime.batcher import Batcher
from worker.runtime.cache_batch import CacheBatch
from worker.runtime.canary import Canaries
from worker.runtime.endpoints import EnginePool, Health
from worker.runtime.journal import Journal
from worker.runtime.limiter import BatchSize, RetryBudget
from worker.runtime.outputs import Outputs, Provenance
from worker.runtime.question import Question
from worker.runtime.quota import TenantQuota
from worker.runtime.router import Asked, Router, Safeguards
from worker.settings import Settings
from worker.wiring.cache import cache_counters
from worker.wiring.engines import Engines, batch_items, tokenizer
from worker.wiring.questions import Calibrated, canaries_for


def _digest(calibration: Calibration | NoCalibration) -> str | None:
    return calibration.artefact.digest if isinstance(calibration, Calibration) else None


class Routing:
    """What decides about tickets, wherever they come from, with what has to be closed after it."""

    def __init__(
        self,
        settings: Settings,
        question: Question,
        calibration: Calibration | NoCalibration,
        *,
        engines: Engines,
        cache: ScoreCache,
        secret: bytes,
        journal: Journal,
        patience: Patience,
        further: Sequence[Calibrated] = (),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        rule_set = question.rule_set
        embedded = settings.engine == "llama_cpp"
        health = Health(concurrency=1 if embedded else settings.batch_concurrency)
        size = BatchSize(batch_items(settings), 2 * health.latency_target_s)
        self.pool = EnginePool(
            engines,
            question.primitive.request(rule_set.categories.categories[0].description),
            question.identity,
            health,
            clock=time.monotonic,
            sleep=sleep,
            on_change=journal.engine_changed,
            on_call=journal.engine_called,
            on_rows=journal.rows_checked,
            on_answer=size.answered,
        )
        self._batcher = Batcher(
            self.pool.score,
            # One after the other, the questions about a ticket find what llama.cpp still holds of its prompt.
            max_items=batch_items(settings),
            max_wait_s=settings.batch_wait_ms / 1000,
            concurrency=settings.batch_concurrency * len(engines),
            size=lambda: size.limit,
            ask_alone=self.pool.score_alone,
        )
        self._cache = CacheBatch(cache, sleep=sleep)
        self._secret = secret
        self._patience = patience
        self._question = question
        self._engines = engines
        self._journal = journal
        # The embedded engine scores one ticket after the other: it has no rows to mix up, and no time to spare.
        self._watches_rows = not embedded
        self._budget = RetryBudget(time.monotonic)
        self._sleep = sleep
        self.router = self.router_for(question, calibration, further, self._safeguards(further))
        provenance = Provenance(
            engine=question.identity.engine,
            model=question.identity.model,
            calibration=_digest(calibration),
            further=tuple(_digest(own) for _, own in further),
        )
        self.outputs = Outputs(rule_set, provenance)
        journal.watch_cache(*cache_counters(cache), self._cache.counters)

    def _safeguards(self, further: Sequence[Calibrated]) -> Safeguards:
        """What stands between the authors of tickets and the rule set's decisions."""
        question, rules = self._question, self._question.rule_set.rules
        # All questions are asked about the same text, so that an engine that keeps its state computes it once.
        budgets = [one.budget for one in (question, *(asked for asked, _ in further)) if one.budget is not None]
        least = min(budgets, key=lambda budget: budget.tokens, default=None)
        other, quota = question.other_order, rules.length.tenant_characters_per_minute
        return Safeguards(
            reader=None if least is None else replace(question, budget=least).reader(tokenizer(self._engines)),
            flagger=flagger_for(question.rule_set) if rules.steering.recheck_share > 0 else None,
            other_order=None if other is None else (other.primitive, self._cache_key(other)),
            quota=None if quota is None else TenantQuota(quota, time.monotonic),
            on_checked=self._journal.checked,
        )

    def router_for(
        self,
        question: Question,
        calibration: Calibration | NoCalibration,
        further: Sequence[Calibrated] = (),
        safeguards: Safeguards | None = None,
    ) -> Router:
        """Another router over the same cache, batches and engines."""
        return Router(
            rule_set=question.rule_set,
            primitive=question.primitive,
            calibration=calibration,
            asker=Asker(
                cache=self._cache,
                batcher=self._batcher,
                pool=self.pool,
                budget=self._budget,
                patience=self._patience,
                clock=time.monotonic,
                sleep=self._sleep,
                jitter=random.random,
            ),
            clock=time.monotonic,
            cache_key=self._cache_key(question),
            further=[
                Asked(asked.behind.question, asked.primitive, own, self._cache_key(asked))
                for asked, own in further
                if asked.behind is not None
            ],
            safeguards=safeguards,
        )

    def _cache_key(self, question: Question) -> ScoreKey:
        prints = question.fingerprints
        return ScoreKey(
            self._secret,
            rule_set=self._question.rule_set.id,
            model=prints.model,
            tokenizer=prints.tokenizer,
            prompt=prints.prompt,
            label_token_ids=question.primitive.token_ids,
            category_set=prints.categories,
            normaliser=prints.normaliser,
        )

    async def __aenter__(self) -> Self:
        if self._watches_rows:
            known = await canaries_for(self._question, self._engines, self._journal.waiting)
            if known:
                self.pool.watch_rows(Canaries(known, random.random))
            else:
                self._journal.rows_unwatched(
                    "the model answers no two of the rule set's examples clearly differently, so that an engine which "
                    "mixed up the rows of its answers could not be told"
                )
        self.pool.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._batcher.aclose()
        await self._cache.aclose()
        await self.pool.aclose()
