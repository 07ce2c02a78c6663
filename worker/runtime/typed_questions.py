"""TypedQuestions: questions that requests bring along, made ready for the engine once and asked like any other.

A question becomes a prompt with labels, checked by the engine's tokenizer behind the whole of that prompt, and a Router
of its own without a calibration: cache, batches, retries and endpoints are those of every ticket.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from worker.core.labels import Tokenize
from worker.core.primitives import ChooseOne
from worker.core.rules import RuleSet
from worker.core.systemone import TypedQuestion
from worker.core.ticket import Ticket
from worker.core.turns import Turns
from worker.core.typed_question import as_rule_set, put, unlabelled_prompt
from worker.errors import TooLong
from worker.runtime.router import Routed, Router

MakeRouter = Callable[[RuleSet, ChooseOne], Router]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A question that may be asked; `tokens` is what it takes of a prompt besides the text."""

    router: Router
    tokens: int

    async def ask(self, text: str) -> Routed:
        """`text` is canonical. Never raises but for cancellation and bugs: without scores the decision says why."""
        return await self.router.route(Ticket(id=None, text=text))


class TypedQuestions:
    """Keeps the last `most_kept` questions; prepares `at_once` at a time, and equal ones once."""

    def __init__(
        self,
        *,
        turns: Turns | None,
        tokenize: Tokenize,
        context_tokens: int,
        make_router: MakeRouter,
        most_kept: int = 256,
        at_once: int = 2,
    ) -> None:
        """`turns` are those of the engine's chat model, None for a base model."""
        self._turns = turns
        self._tokenize = tokenize
        self._context_tokens = context_tokens
        self._make_router = make_router
        self._most_kept = most_kept
        self._slots = asyncio.Semaphore(at_once)
        self._kept: OrderedDict[TypedQuestion, Prepared] = OrderedDict()
        self._under_way: dict[TypedQuestion, asyncio.Task[Prepared]] = {}

    async def prepared(self, question: TypedQuestion) -> Prepared:
        """Raises LabelError where the engine lacks labels for it, TooLong where no text fits behind it, EngineError."""
        found = self._kept.get(question)
        if found is not None:
            self._kept.move_to_end(question)
            return found
        task = self._under_way.get(question)
        if task is None:
            task = asyncio.create_task(self._prepare(question))
            self._under_way[question] = task
            task.add_done_callback(lambda done: self._end(question, done))
        return await asyncio.shield(task)

    async def tokens_of(self, text: str) -> int:
        """Tokens of a text by itself. Raises EngineError."""
        return len((await self._tokenize([text or "x"]))[0])

    async def aclose(self) -> None:
        tasks = tuple(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _prepare(self, question: TypedQuestion) -> Prepared:
        async with self._slots:
            rule_set = as_rule_set(question, self._turns)
            # Before labels are tried, each behind a copy of the prompt: one that does not fit would cost as much.
            prompt = unlabelled_prompt(rule_set)
            tokens = await self.tokens_of(prompt.prefix + prompt.item("x"))
            if tokens > self._context_tokens:
                raise TooLong(tokens, self._context_tokens)
            return Prepared(self._make_router(rule_set, await put(question, rule_set, self._tokenize)), tokens)

    def _end(self, question: TypedQuestion, done: asyncio.Task[Prepared]) -> None:
        self._under_way.pop(question, None)
        if done.cancelled() or done.exception() is not None:
            return  # whoever waits is told; the next who asks tries again
        self._kept[question] = done.result()
        while len(self._kept) > self._most_kept:
            self._kept.popitem(last=False)
