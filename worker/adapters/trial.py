"""The trial question that an engine's server is asked before any ticket, and what its answer gives away."""

from __future__ import annotations

import math
from collections.abc import Sequence

TRIAL_PROMPT = "Question: which team handles this ticket?\nAnswer:"
LETTERS = "ABCDEFGHIJKLMNOP"
TRIAL_TEXTS = tuple(f"{TRIAL_PROMPT} {letter}" for letter in LETTERS)


def trial_labels(token_ids: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The distinct last tokens of the tokenized `TRIAL_TEXTS`, in order."""
    return tuple(dict.fromkeys(ids[-1] for ids in token_ids if ids))


def grid_note(logprobs: Sequence[float], cure: str) -> tuple[str, ...]:
    """A sentence for the operator where log-probabilities of likely tokens lie on a grid, else nothing."""
    step = grid_step(logprobs)
    if step is None:
        return ()
    return (
        f"log-probabilities lie on a grid of {step:g} nats or coarser (bf16 head), so ties occur; {cure}, and a "
        "calibration holds for one setting only",
    )


def grid_step(logprobs: Sequence[float]) -> float | None:
    """The step in nats that all differences are multiples of, if there is one.

    Logits of a bf16 head keep 8 significant bits: between 8 and 16 they lie 1/16 apart, between 16 and 32 1/8; unlikely
    tokens' logits are small and hide the grid, so ask for likely ones. By chance, 15 differences are all within 1/50 of
    a step of its multiples with a probability below 1e-20.
    """
    for step in (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32):
        if all(abs(math.remainder(value - logprobs[0], step)) < step / 50 for value in logprobs):
            return step
    return None


def without_folder(path: str) -> str:
    """A model's name; of a local folder the last part only, since folders say much about a machine."""
    path = path.rstrip("/")
    is_folder = path.startswith(("/", ".")) or path.count("/") > 1
    return path.rsplit("/", 1)[-1] if is_folder else path
