"""docs/engines.md lists the cases of the contract, and every engine that the suite asks is in it."""

from __future__ import annotations

from typing import get_args

from tests.contracts import engine_table, test_engine
from worker.settings import EngineName

PAGE = engine_table.PAGE.read_text(encoding="utf-8")


def test_the_table_is_that_of_the_suite() -> None:
    """Red means: run `python -m tests.contracts.engine_table`."""
    assert engine_table.with_table(PAGE, test_engine) == PAGE
    assert len(engine_table.cases(test_engine)) > 25


def test_every_engine_of_the_suite_has_a_column() -> None:
    asked = {name for parameters in engine_table.COLUMNS.values() for name in parameters}
    servers = {f"{server}_{way}" for server in test_engine.SERVERS for way in ("recorded", "live")}
    assert asked == servers | {"llama_cpp", "llama_cpp_server"}


def test_remarks_are_about_cases_that_are_there() -> None:
    known = {(name, column) for name in engine_table.cases(test_engine) for column in engine_table.COLUMNS}
    assert set(engine_table.REMARKS) <= known


def test_every_engine_that_can_be_set_is_described() -> None:
    assert all(f"`{name}`" in PAGE for name in get_args(EngineName))
