"""Whatever stands in a file or a topic: nothing of it is obeyed by the terminal that shows it."""

from __future__ import annotations

import io
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.markup import escape
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

from tests.acceptance.served import write_rules
from tests.integration.desk import COMMAND
from worker.console.visible import VisibleConsole, visible

EVIL = "evil\x1b]0;PWNED\x07\x1b[2J\x9b2J\x08\x7f\u202e"
OWN = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[lh]|[12]?[AKHJ])")
"""What Rich itself writes: colours, the cursor, and where a bar is drawn anew."""


def shown(*printed: object, markup: bool = True, terminal: bool = True) -> str:
    out = io.StringIO()
    console = VisibleConsole(
        file=out, width=60, force_terminal=terminal, color_system="truecolor", legacy_windows=False
    )
    console.print(*printed, markup=markup, highlight=False)
    return out.getvalue()


def obeyed(text: str) -> list[str]:
    return re.findall("[^\n\t -~\xa0-\u2027\u202f-\u2065\u206a-\U0010ffff]", OWN.sub("", text))


def table_of(text: str) -> Table:
    table = Table(title=escape(text), caption=escape(text))
    table.add_column(escape(text), style="red")
    table.add_row(escape(text), style="bold")
    table.add_row(Text(text, "green"))
    return table


@pytest.mark.parametrize("terminal", [True, False])
def test_an_escape_sequence_is_shown_and_not_obeyed(terminal: bool) -> None:
    for said in (shown(EVIL, markup=False, terminal=terminal), shown(f"[red]{escape(EVIL)}[/]", terminal=terminal)):
        assert obeyed(said) == []
        assert r"evil\u001b]0;PWNED\u0007\u001b[2J\u009b2J\u0008\u007f\u202e" in said.replace("\n", "")


@given(st.text(st.characters(codec=None) | st.sampled_from("\x1b\x9b\x07\r\n\t[]\\;m"), max_size=40))
def test_no_text_wherever_it_is_drawn_is_obeyed(text: str) -> None:
    for said in (shown(text, markup=False), shown(escape(text)), shown(table_of(text)), shown(Text(text))):
        assert obeyed(said) == []


def test_a_table_keeps_its_columns_where_a_cell_was_made_visible() -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("a\x1b[2Jb", "|")
    table.add_row("plain", "|")
    lines = shown(table, terminal=False).splitlines()
    assert lines[0].index("|") == lines[1].index("|")


def test_texts_of_many_scripts_stay_as_they_are() -> None:
    text = "환불해 주세요\u3000👩\u200d💻 naïve\u00a0x\tתודה"
    assert visible(text) is text
    assert visible("one\r\ntwo\rthree") == "one\ntwo\\u000dthree"


def test_a_bar_named_after_a_file_is_drawn_by_rich_and_by_nobody_else() -> None:
    out = io.StringIO()
    console = VisibleConsole(file=out, width=60, force_terminal=True, color_system=None, legacy_windows=False)
    with Progress(TextColumn("{task.description}", markup=False), console=console) as progress:
        progress.add_task(EVIL, total=2)
    assert obeyed(out.getvalue().replace("\r", "")) == []
    assert "evil" in out.getvalue()


def test_an_error_about_a_labelled_file_quotes_nothing_that_is_obeyed(tmp_path: Path) -> None:
    write_rules(tmp_path, "", calibrated=False)
    rows = f"id,text,label\n{EVIL},a,billing\n{EVIL},b,login\n"
    (tmp_path / "labelled.csv").write_text(rows, encoding="utf-8")
    command = [str(COMMAND), "calibrate", "--rules", str(tmp_path), "--labelled", str(tmp_path / "labelled.csv")]
    done = subprocess.run(command, capture_output=True, timeout=120, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert b"evil" in done.stderr
    assert obeyed(done.stderr.decode()) == []
