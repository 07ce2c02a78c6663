"""Prior matching: probabilities for a desk that has no labels yet, from its historical shares. Certifies nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from worker.core.artefact import Artefact
from worker.core.fitting import match_prior
from worker.errors import ConfigError
from worker.offline.scoring import ScoredTicket
from worker.offline.screening import reaching_the_score
from worker.runtime.question import Question


def match_history(
    question: Question, unlabelled: Iterable[ScoredTicket], shares: Mapping[str, float], *, created_at: str
) -> Artefact:
    """An artefact under which every ticket escalates, with suggestions that follow the desk's shares.

    `unlabelled`: at least 500 tickets of current traffic that pass the label mass gate. `shares`: category id to its
    historical share or count, every category of the set in it. Raises ConfigError.
    """
    rule_set = question.rule_set
    ids = rule_set.categories.ids
    missing, unknown = sorted(set(ids) - set(shares)), sorted(set(shares) - set(ids))
    if missing or unknown:
        problems = [f"no share for {', '.join(missing)}"] * bool(missing)
        problems += [f"{', '.join(unknown)} is no category of the set"] * bool(unknown)
        raise ConfigError(f"historical shares: {'; '.join(problems)}")
    floor = rule_set.rules.gates.min_label_mass
    tickets = [t for t in reaching_the_score(list(unlabelled), rule_set) if t.mass >= floor]
    tickets.sort(key=lambda ticket: ticket.id)
    try:
        calibrator = match_prior([t.logprobs for t in tickets], [shares[category] for category in ids])
    except ValueError as error:
        raise ConfigError(f"historical shares: {error}") from error
    return Artefact(
        rule_set=rule_set.id,
        created_at=created_at,
        engine=question.identity.engine,
        model_name=question.identity.model,
        labels=ids,
        fingerprints=question.fingerprints,
        form="max_probability",
        min_label_mass=floor,
        calibrator=calibrator,
        certificates=(),
        data={"labelled": 0, "unlabelled": len(tickets), "shares": {c: shares[c] for c in ids}},
        notes=(
            "matched to historical shares: probabilities are plausible, nothing is certified, everything escalates",
        ),
    ).sealed()
