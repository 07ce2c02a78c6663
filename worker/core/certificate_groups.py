"""Certificate groups: which categories are certified alone, which together, decided from counts only.

An overall error rate hides a bad category: under one global threshold some single category was above alpha in most
draws. So each category with enough predicted tickets has its own certificate, and the rest are merged before anything
is known of their errors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from worker.core.binomial import n_min
from worker.core.certificates import Basis, Certificate, ScoreForm
from worker.core.guarantees import Subject, certify

POOL = "pool"


@dataclass(frozen=True, slots=True)
class Group:
    """Categories that share one threshold. `count` is the number of certification tickets predicted as one of them."""

    name: str
    members: tuple[str, ...]
    count: int
    basis: Basis


def form_groups(
    counts: Mapping[str, int],
    *,
    fewest: int,
    parents: Mapping[str, str] | None = None,
    excluded: Collection[str] = (),
) -> tuple[Group, ...]:
    """At least 2 * `fewest` predicted tickets: a group of its own; else merged up the taxonomy, at last into one pool.

    `counts`: certification tickets *predicted* as each category (no label is looked at); `fewest`: n_min. `parents`:
    node above a category or node. `excluded` categories never route (`none`; few labels to fit on): decide them without
    the certification labels. A category that nothing was predicted as is excluded too. Raises ValueError where the
    taxonomy has a cycle.
    """
    above = dict(parents or {})
    out = {name for name, count in counts.items() if count == 0 or name in excluded}
    groups = [Group(name, (name,), counts[name], "excluded") for name in counts if name in out]
    own = {name for name, count in counts.items() if count >= 2 * fewest and name not in out}
    groups += [Group(name, (name,), counts[name], "own") for name in counts if name in own]
    waiting = {name: [name] for name in counts if name not in out | own}
    pool: list[str] = []
    depth = {node: _depth(node, above) for name in waiting for node in _path(name, above)}
    for node in sorted(depth, key=lambda node: (-depth[node], node)):
        members = waiting.pop(node, [])
        if members and sum(counts[name] for name in members) >= 2 * fewest:
            groups.append(_group(node, members, counts, "taxonomy"))
        elif node in above:
            waiting.setdefault(above[node], []).extend(members)
        else:
            pool += members
    if pool:
        groups.append(_group(POOL, pool, counts, "pool"))
    return tuple(groups)


def certify_categories(
    predicted: ArrayLike,
    scores: ArrayLike,
    errors: ArrayLike,
    categories: Sequence[str],
    *,
    alpha: float,
    delta: float,
    joint: bool = False,
    parents: Mapping[str, str] | None = None,
    excluded: Collection[str] = (),
    score: ScoreForm = "raw_margin",
) -> tuple[Certificate, ...]:
    """One certificate a group, every category in exactly one of them, excluded ones refused.

    `predicted` (n,) label indices into `categories`, with `scores` and `errors` as for `certify`. Each certificate
    holds with probability 1 - delta by itself; with `joint` all of them hold together with 1 - delta (delta / G each).
    Raises ValueError.
    """
    label = np.asarray(predicted, dtype=np.int64)
    s, e = np.asarray(scores, dtype=np.float64), np.asarray(errors)
    if not label.shape == s.shape == e.shape or label.ndim != 1:
        raise ValueError(f"labels {label.shape}, scores {s.shape} and errors {e.shape}: expected one each a ticket")
    if label.size and not 0 <= label.min() <= label.max() < len(categories):
        raise ValueError(f"a predicted label is no index of the {len(categories)} categories")
    tally = np.bincount(label, minlength=len(categories)).tolist()
    counts = dict(zip(categories, tally, strict=True))
    groups = form_groups(counts, fewest=n_min(alpha, delta), parents=parents, excluded=excluded)
    share = delta
    if joint:
        # A smaller level needs larger groups, which makes fewer of them: the first count is enough to divide by.
        share = delta / max(1, sum(group.basis != "excluded" for group in groups))
        groups = form_groups(counts, fewest=n_min(alpha, share), parents=parents, excluded=excluded)
    index = {name: i for i, name in enumerate(categories)}
    order = np.argsort(label, kind="stable")
    ends = np.concatenate(([0], np.cumsum(tally)))
    certificates = []
    for group in groups:
        subject = Subject(group.name, group.members, group.basis, score)
        rows = np.concatenate([order[ends[index[name]] : ends[index[name] + 1]] for name in group.members])
        if group.basis == "excluded":
            certificates.append(_excluded(subject, rows.size, alpha, share))
        else:
            certificates.append(certify(s[rows], e[rows], alpha=alpha, delta=share, subject=subject))
    return tuple(certificates)


def _group(name: str, members: Collection[str], counts: Mapping[str, int], basis: Basis) -> Group:
    """Members in the order of the categories, whatever way they came up."""
    ordered = tuple(member for member in counts if member in members)
    return Group(name, ordered, sum(counts[member] for member in ordered), basis)


def _excluded(subject: Subject, n: int, alpha: float, delta: float) -> Certificate:
    return Certificate(
        subject.group, subject.members, subject.basis, "rank", subject.score, n, 0, 0, alpha, delta, 0.0, math.inf, None
    )


def _path(node: str, above: Mapping[str, str]) -> list[str]:
    path = [node]
    while path[-1] in above:
        path.append(above[path[-1]])
        if path[-1] in path[:-1]:
            raise ValueError(f"the taxonomy has a cycle: {' > '.join(path)}")
    return path


def _depth(node: str, above: Mapping[str, str]) -> int:
    return len(_path(node, above))
