"""How one ticket's decision looks, with everything that it follows from."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from worker.core.cards import nearest_in_english, suggestions_of
from worker.core.envelope import Answer, Envelope, Reason
from worker.core.korean import in_korean, nearest_in_korean
from worker.core.policy import promised
from worker.core.rules import RuleSet
from worker.runtime.deciding import Decided
from worker.serving.deciding import OwnDecision

SHOWN = 400
"""Characters of a ticket."""


def print_decision(out: Console, own: OwnDecision) -> None:
    """Where it goes, then a row for each thing that says why."""
    rules, envelope = own.rule_set, own.decided.envelope
    if envelope.action == "route":
        title = rules.categories.title(envelope.category or "")
        said, style = f"routed to '{title}': {envelope.topic}", "bold green"
    else:
        said, style = f"to a person: {envelope.topic}", "bold yellow"
    out.print(said, style=style, markup=False, highlight=False, soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(own.decided, rules):
        table.add_row(name, escape(value))
    out.print(table, highlight=False)


def _rows(decided: Decided, rules: RuleSet) -> Iterator[tuple[str, str]]:
    """Each with what it is called; a name that is empty goes on with the row before."""
    envelope, korean = decided.envelope, rules.categories.language == "ko"
    yield from _ticket(decided)
    yield "why", _sentences(envelope.reasons, korean)
    if envelope.nearest is not None:
        title = rules.categories.title(envelope.nearest.category)
        yield "", nearest_in_english(envelope.nearest, title)
        if korean:
            yield "", nearest_in_korean(envelope.nearest, title)
    if envelope.would is not None:
        yield "in auto", f"it would go to {envelope.would.topic}"
        yield "", _sentences(envelope.would.reasons, korean)
    yield from _likeliest(envelope, rules)
    yield from _certificate(decided)
    for answer in envelope.answers:
        yield answer.question, _answer(answer)
    yield "mode", _mode(envelope)
    yield "model", "not asked" if envelope.model is None else f"{envelope.model}, {envelope.engine}"
    yield "calibration", envelope.calibration or "none in force"
    yield "rule set", envelope.rule_set
    yield "decision", f"{envelope.decision_id}, {envelope.timings.total_ms:,.0f} ms"


def _ticket(decided: Decided) -> Iterator[tuple[str, str]]:
    """What is read of it: canonical, and less than the whole where the rule set leaves parts out, or it is too long."""
    whole, read = decided.ticket.text, decided.routed.read
    yield "ticket", _short(whole)
    if read is not None:
        yield "read", f"{len(read):,} of {len(whole):,} characters: {_short(read)}"


def _sentences(reasons: tuple[Reason, ...], korean: bool) -> str:
    said = [why.sentence for why in reasons]
    return "\n".join(said + [in_korean(why) for why in reasons] if korean else said)


def _likeliest(envelope: Envelope, rules: RuleSet) -> Iterator[tuple[str, str]]:
    name = "likeliest"
    for each in suggestions_of(envelope, rules):
        sure = "" if each.probability is None else f"{each.probability:.4f}  "
        yield name, f"{sure}{each.category}: {each.title}"
        name = ""
    if envelope.probability is not None:
        yield (
            "",
            f"'{rules.categories.title(envelope.category or '')}' is right with probability {envelope.probability:.4f}",
        )


def _certificate(decided: Decided) -> Iterator[tuple[str, str]]:
    """What the score was held against; nothing where there is none, which is said elsewhere."""
    nearest = decided.routed.decision.nearest
    allowance = None if nearest is None else nearest.certificate
    if allowance is not None:
        bar = "whatever the score" if allowance.threshold is None else f"threshold {allowance.threshold:.4g}"
        yield "certificate", f"'{allowance.group}', {bar}: {promised(allowance)}"


def _answer(answer: Answer) -> str:
    if answer.answer is None:
        said = "unknown"
    else:
        said = answer.answer if answer.probability is None else f"{answer.answer}, probability {answer.probability:.4g}"
    if answer.expected is not None:
        said += f", expected level {answer.expected:.3g}"
    return said if answer.problem is None else f"{said}; rules take it as unknown. {answer.problem.sentence}"


def _mode(envelope: Envelope) -> str:
    if envelope.mode == "shadow":
        return "shadow: people decide, and their card shows nothing of this"
    return "assist: people decide, with a suggestion" if envelope.mode == "assist" else "auto"


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN * 2 // 3]} […] {text[-SHOWN // 3 :]}"
