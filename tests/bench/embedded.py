"""What a ticket costs the embedded engine by categories and by its length: `python -m tests.bench.embedded`.

CPU time is counted, so that other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import orjson

from tests.bench.tickets import ticket_bytes
from worker import wiring
from worker.adapters.llama_cpp import LlamaCppEngine
from worker.core.categories import Category, CategorySet, PromptStyle
from worker.core.normalise import canonical
from worker.core.rules import Rules, RuleSet

CATEGORIES = (5, 15, 30)
"""With their examples more do not fit into the embedded model's context of 4,096 tokens."""
CHARACTERS = (100, 400, 1_600)
EXAMPLES = 3
TICKETS = 12


@dataclass(frozen=True, slots=True)
class Row:
    categories: int
    prompt_tokens: int
    characters: int
    ticket_tokens: int
    cpu_ms: float


def _texts(characters: int) -> Iterator[str]:
    """Each begins otherwise, so that nothing of one is kept for the next."""
    samples = [canonical(orjson.loads(value)["text"]) for value in ticket_bytes(400)]
    for first in range(0, len(samples), 3):
        yield " ".join(samples[first:] + samples[:first])[:characters].strip()


def _rule_set(count: int) -> RuleSet:
    examples = _texts(80)
    categories = tuple(
        Category(
            id=f"queue{n}",
            name=f"Queue {n}",
            description=f"what queue {n} is for",
            examples=tuple(islice(examples, EXAMPLES)),
        )
        for n in range(count)
    )
    prompt = PromptStyle(instruction="Each ticket belongs to exactly one queue.")
    return RuleSet(
        categories=CategorySet(id="sizing", version=1, language="en", prompt=prompt, categories=categories),
        rules=Rules(version=1, alpha=0.1, delta=0.1),
    )


async def measure(categories: Sequence[int], characters: Sequence[int], tickets: int) -> list[Row]:
    rows = []
    engine = LlamaCppEngine(None, threads=1)
    try:
        for count in categories:
            question = await wiring.ask_once(_rule_set(count), engine)
            for length in characters:
                requests = [question.primitive.request(text) for text in islice(_texts(length), 100, 101 + tickets)]
                first, *rest = requests
                (prefix, *items) = await engine.tokenize([first.prefix, *(str(r.item) for r in rest)])
                await engine.score([first])  # the prompt is computed once, and kept
                began = time.process_time()
                for request in rest:
                    await engine.score([request])
                spent = time.process_time() - began
                tokens = sum(map(len, items)) / len(items)
                rows.append(Row(count, len(prefix), length, round(tokens), spent / len(rest) * 1_000))
    finally:
        await engine.aclose()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tickets", type=int, default=TICKETS)
    tickets = parser.parse_args().tickets
    print(
        "| categories | tokens of the prompt, kept | characters of a ticket | its tokens | CPU ms |\n"
        + "|---" * 5
        + "|"
    )
    for row in asyncio.run(measure(CATEGORIES, CHARACTERS, tickets)):
        print(
            f"| {row.categories} | {row.prompt_tokens} | {row.characters} | {row.ticket_tokens} | {row.cpu_ms:,.0f} |"
        )


if __name__ == "__main__":
    main()
