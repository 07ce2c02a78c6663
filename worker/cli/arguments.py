"""Arguments that several commands take, and how they are read."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from worker.adapters.writing import WAYS
from worker.settings import EngineName, Settings, load_settings


def moment_ms(text: str) -> int:
    """Milliseconds since 1970."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter("write it as 2026-03-02T08:00:00Z") from error
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def one_way(text: str) -> str:
    if text not in WAYS:
        raise typer.BadParameter(f"one of {', '.join(WAYS)}, not '{text}'")
    return text


def makeable(folder: Path) -> Path:
    """Refuses a folder that could not be written to when the work is done; makes nothing yet."""
    nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"{folder} cannot be made a folder: {nearest} is not one that can be written to")
    return folder


def writable(file: Path | None) -> Path | None:
    """The same for a file that is named at all."""
    if file is not None:
        makeable(file.parent)
        if file.is_dir():
            raise typer.BadParameter(f"{file} is a folder; name a file")
    return file


Rules = Annotated[Path, typer.Option("--rules", help="Folder of a rule set.", show_default=False)]
LabelledFile = Annotated[
    Path | None, typer.Option("--labelled", help="CSV or JSONL with text and label; default: the set's own samples.")
]
FurtherQuestion = Annotated[
    str | None,
    typer.Option("--question", help="Id of a further question (questions.yaml) in place of the set's own."),
]
Part = Annotated[
    Literal["all", "calibration", "demo"],
    typer.Option(help="Which part of the file: samples are split by a hash of their id."),
]
UnlabelledFile = Annotated[
    Path | None, typer.Option("--unlabelled", help="CSV or JSONL with text: current traffic, at least 500 tickets.")
]
Scores = Annotated[Path, typer.Option("--scores", help="JSONL journal of scores: a second run goes on from it.")]
JOURNAL = Path("build/scores.jsonl")
Engine = Annotated[EngineName | None, typer.Option("--engine", help="In place of ROUTER_ENGINE.")]
WhatIf = Annotated[float | None, typer.Option(min=0.0001, max=0.5, help="What if? Nothing is written.")]
Moment = Annotated[
    int | None,
    typer.Option(parser=moment_ms, metavar="ISO8601", help="By the time of the records; UTC unless it says otherwise."),
]


def engine_settings(engine: EngineName | None = None, otherwise: EngineName | None = None) -> Settings:
    """`otherwise` is the engine where neither `engine` nor the settings name one."""
    settings = load_settings()
    if engine is None and not settings.model_fields_set & {"engine", "engine_url"}:
        engine = otherwise
    return settings if engine is None else settings.model_copy(update={"engine": engine})
