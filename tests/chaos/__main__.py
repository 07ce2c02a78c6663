"""The chaos run: exactly-once delivery under a seeded schedule of faults, on Apache Kafka with one node and with three.

The last line says what came of it; the exit code is 1 unless nothing is missing, doubled or out of order, every fault
happened, and it was over in time.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.deployment import GROUP_SETTINGS, Unexpected
from tests.chaos.run import Run
from tests.chaos.schedule import Kind, plan

FOLDER = Path(__file__).parents[2] / "build" / "chaos"
"""Logs stay here where a run failed."""

ONE_NODE = tuple(kind for kind in Kind if kind is not Kind.BROKER_KILL)


@dataclass(frozen=True, slots=True)
class Part:
    """The run on one kind of cluster."""

    nodes: int
    tickets: int
    faults: int
    kinds: tuple[Kind, ...]
    """Each of them happens at least once."""


@dataclass(frozen=True, slots=True)
class Length:
    deadline_s: float
    parts: tuple[Part, ...]


FULL = Length(600.0, (Part(1, 10_000, 22, ONE_NODE), Part(3, 10_000, 24, tuple(Kind))))
SHORT = Length(
    180.0,
    (
        Part(1, 2_400, 13, ONE_NODE),
        Part(3, 1_200, 5, (Kind.BROKER_KILL, Kind.WORKER_KILL, Kind.WORKER_TERM)),
    ),
)


class Story:
    """What is printed, with the time since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)


def play(
    length: Length,
    nodes: tuple[int, ...],
    only: tuple[Kind, ...],
    seed: int,
    deadline_s: float,
    group_protocol: str,
    folder: Path,
) -> int:
    """The exit code. With `only` no other kinds happen."""
    say = Story()
    until = time.monotonic() + deadline_s
    shutil.rmtree(folder, ignore_errors=True)
    runs: list[Run] = []
    watch = threading.Timer(deadline_s, _out_of_time, (runs, seed, deadline_s))
    watch.daemon = True
    watch.start()
    for part in length.parts:
        if part.nodes not in nodes:
            continue
        kinds = tuple(kind for kind in only if part.nodes == 3 or kind in ONE_NODE) or part.kinds
        faults = plan(seed, part.nodes, part.faults, kinds)
        told = f"{part.tickets:,} tickets, {len(faults)} faults, seed {seed}, {group_protocol} group"
        say(f"Apache Kafka, nodes: {part.nodes}; {told}")
        place = folder / f"{part.nodes}-nodes"
        run = Run(place, part.nodes, part.tickets, faults, seed, until, say, group_protocol)
        runs.append(run)
        try:
            run.play()
        except Exception as problem:  # whatever it is, the last line is the last line
            if not isinstance(problem, (Unexpected, TimeoutError)):
                traceback.print_exc()
            run.outcome.problems.append(str(problem))
            say(f"PROBLEM {problem} ({run.outstanding()})")
    watch.cancel()
    good = all(
        run.outcome.verdict is not None and not run.outcome.problems and run.outcome.struck == len(run.faults)
        for run in runs
    )
    if good:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        say(f"what the processes said is under {folder}")
    print(last_line(runs, seed), flush=True)
    return 0 if good else 1


def last_line(runs: list[Run], seed: int) -> str:
    verdicts = [run.outcome.verdict for run in runs if run.outcome.verdict is not None]
    struck, planned = sum(run.outcome.struck for run in runs), sum(len(run.faults) for run in runs)
    faults = f"{struck} faults" if struck == planned else f"{struck} of {planned} faults"
    unjudged = "" if len(verdicts) == len(runs) else f"{len(runs) - len(verdicts)} of {len(runs)} runs not judged, "
    return (
        f"chaos: {sum(verdict.tickets for verdict in verdicts)} tickets, {faults}, {unjudged}"
        f"missing {sum(len(verdict.missing) for verdict in verdicts)}, "
        f"duplicates {sum(len(verdict.duplicates) for verdict in verdicts)}, "
        f"order violations {sum(len(verdict.out_of_order) for verdict in verdicts)}, seed {seed}"
    )


def _out_of_time(runs: list[Run], seed: int, deadline_s: float) -> None:
    """Whatever hangs: the processes end with this one."""
    told = runs[-1].outstanding() if runs else "nothing was begun"
    print(f"chaos: out of time after {deadline_s:g} s: {told}; seed {seed}", flush=True)
    os._exit(1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--short", action="store_true", help="every kind of fault once, in less than three minutes")
    parser.add_argument("--seed", type=int, help="of an earlier run: the same tickets and faults; random by default")
    parser.add_argument("--nodes", type=int, choices=(1, 3), help="only on this cluster")
    parser.add_argument("--only", type=Kind, action="append", default=[], help=f"of {', '.join(Kind)}; may be repeated")
    parser.add_argument("--deadline-s", type=float, help="the run is over then (600; short: 180)")
    parser.add_argument("--group-protocol", choices=tuple(GROUP_SETTINGS), default="classic", help="consumer: KIP-848")
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="emptied first; one of its own for every run at the same time"
    )
    arguments = parser.parse_args()
    length = SHORT if arguments.short else FULL
    seed = secrets.randbelow(100_000) if arguments.seed is None else arguments.seed
    nodes = (arguments.nodes,) if arguments.nodes else (1, 3)
    try:
        return play(
            length,
            nodes,
            tuple(arguments.only),
            seed,
            arguments.deadline_s or length.deadline_s,
            arguments.group_protocol,
            arguments.folder.absolute(),
        )
    except (pytest.skip.Exception, pytest.fail.Exception) as missing:  # no Java, no Redis
        print(f"chaos: {missing}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
