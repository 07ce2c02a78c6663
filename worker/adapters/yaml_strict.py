"""Strict YAML: one document of plain data, or an error that names file and line.

YAML 1.1's surprises are refused or gone: `NO` is a string, dates are strings, `.nan` and `.inf` are errors, a key that
stands twice is an error, and there are no anchors, aliases or tags, so that nothing can explode.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import orjson
import yaml
from pydantic import BaseModel, ValidationError

from worker.core.categories import PATTERNS_IN_WORDS
from worker.core.misplaced import Misplaced, Place, one_spelling
from worker.errors import RuleSetError

MAX_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 32
SHOWN = 20
"""Problems of a file that an error lists."""
TAB = "\t"
OF_KEY = "[key]"
"""What pydantic 2 ends a place with where the key is wrong and not its value."""
LONGEST_SHOWN = 80
"""Characters of a wrong value that an error shows."""
PER_CENT = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?%")
STARS = "put a text that begins with * or & in quotation marks"
PYYAML_IN_WORDS: Sequence[tuple[re.Pattern[str], str]] = tuple(
    (re.compile(own), words)
    for own, words in (
        (
            "but found '<scalar>'",
            "a quotation mark ends the text too early: write it twice inside of ' ', or put the text in the other kind",
        ),
        (
            "sequence entries are not allowed",
            "a list's '- ' stands where no list line can begin: begin a new line with it",
        ),
        (
            "expected <block end>|but found '<block end>'|expected <block sequence",
            "this line is indented in another way than those it belongs to: begin it in the same column as its "
            "neighbours, with spaces, a list's lines with '- '",
        ),
        (
            "mapping values are not allowed",
            "there is a ': ' too many, the line before lacks one, or this line is indented too far: put a text that "
            "holds ': ' in quotation marks, and begin the line in the same column as its neighbours",
        ),
        (
            "could not find expected ':'|expected ':'",
            "this line, or the one before it, lacks its ': ' after the key, or should be indented under the text above",
        ),
        ("unexpected end of stream", "a quotation mark, or a bracket, is opened and never closed"),
        (
            "expected ',' or|but got",
            "a list in [ ] or a mapping in { } is not closed, or lacks a comma: put a text that begins with [ or { in "
            "quotation marks",
        ),
        ("cannot start any token", "a text must not begin with this character: put it in quotation marks"),
        ("unknown escape", "a backslash in double quotation marks means something else: use single ones"),
        ("expected a single document|but found another document", "there is a '---' in the file: leave it out"),
        ("undefined alias|alphabetic or numeric", STARS),
    )
)
"""What PyYAML 6.0 says, and what people do about it; the first that matches."""
HALF = "an escape stands for half a character: write whole ones"

M = TypeVar("M", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """Only the scalars below are anything but strings."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own shape


for _tag, _pattern, _first in (
    ("bool", r"(?:true|false)$", "tf"),
    ("null", r"(?:null|~|)$", "n~\0"),
    ("int", r"-?(?:0|[1-9][0-9]*)$", "-0123456789"),
    ("float", r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?$", "-0123456789"),
    ("float", r"[-+]?\.(?:nan|NaN|NAN|inf|Inf|INF)$", "-+."),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


def load_model(path: Path, model: type[M]) -> M:
    """The file as a model. Raises RuleSetError that lists what is wrong, each with its line."""
    node = _compose(path)
    found = _Plain()
    data = found.plain(node)
    _refuse(path, found.problems)
    try:
        # Through JSON, because strict models take lists for tuples there and nothing else is coerced.
        return model.model_validate_json(orjson.dumps(data))
    except ValidationError as error:
        problems = error.errors(include_url=False)
        _refuse(path, [_told(node, problem, model) for problem in problems])
        raise  # there is no validation error without a problem


def line_of(path: Path, place: Place) -> int:
    """The line of this part of a file that was read before, or of what is nearest above it. Raises RuleSetError."""
    return _line_of(_compose(path), place)


def _refuse(path: Path, problems: Sequence[tuple[int, str]]) -> None:
    """Raises RuleSetError with these problems in the order of their lines, if there are any."""
    if not problems:
        return
    lines = sorted(dict.fromkeys(problems))
    (first, said), *more = lines[:SHOWN]
    rest = [f"\n  {path}:{line}: {problem}" for line, problem in more]
    if len(lines) > SHOWN:
        rest.append(f"\n  ... and {len(lines) - SHOWN} more")
    raise RuleSetError(f"{path}:{first}", said + "".join(rest))


def _told(node: yaml.Node, problem: Any, model: type[BaseModel]) -> tuple[int, str]:
    """Line and sentence of one of pydantic's errors."""
    place: Place = problem["loc"]
    mistake = problem.get("ctx", {}).get("error")
    if isinstance(mistake, Misplaced):
        return _line_of(node, (*place, *mistake.place)), str(mistake)
    of_key = bool(place) and place[-1] == OF_KEY
    place = place[:-1] if of_key else place
    where = "".join(f"{part}." for part in place)[:-1]
    message, unknown = problem["msg"].removeprefix("Value error, "), problem["type"] == "extra_forbidden"
    if unknown:
        close = get_close_matches(str(place[-1]), _keys_of(model), n=1)
        message = "no such key, so it is not permitted" + (f"; did you mean {close[0]}?" if close else "")
    elif problem["type"] == "string_pattern_mismatch" and (words := PATTERNS_IN_WORDS.get(problem["ctx"]["pattern"])):
        message = f"{_shown(problem['input'])} cannot stand here: {words}"
    else:
        message += _as_a_share(problem)
    return _line_of(node, place, of_key=unknown or of_key), f"{where + ': ' if where else ''}{message}"


def _shown(value: object) -> str:
    text = str(value)
    return f"'{text}'" if len(text) <= LONGEST_SHOWN else f"'{text[:LONGEST_SHOWN]}...'"


def _as_a_share(problem: Any) -> str:
    """How to write what was meant as per cent where a share is expected; nothing where it is something else."""
    value, limit = problem["input"], problem.get("ctx", {})
    of_share = problem["type"] in ("less_than", "less_than_equal") and limit.get("le", limit.get("lt")) <= 1
    if isinstance(value, str) and problem["type"] == "float_type" and (written := PER_CENT.fullmatch(value.strip())):
        value, of_share = float(written[1]), True
    if not of_share or isinstance(value, str | bool) or not 1 <= value <= 100:
        return ""
    return (
        f": {value:g} % is written {value / 100:.2f}" if value % 1 == 0 else f": {value:g} % is written {value / 100:g}"
    )


@cache  # it takes 20 ms, and a file may have as many unknown keys as it has lines
def _keys_of(model: type[BaseModel]) -> tuple[str, ...]:
    """Every key that stands anywhere in such a document."""
    schema = model.model_json_schema()
    parts = (schema, *schema.get("$defs", {}).values())
    return tuple(sorted({key for part in parts for key in part.get("properties", ())}))


def _compose(path: Path) -> yaml.Node:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RuleSetError(str(path), f"larger than {MAX_BYTES} bytes")
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows begin a file with a mark
    except OSError as error:
        raise RuleSetError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RuleSetError(str(path), f"not UTF-8 at byte {error.start}: save it as UTF-8") from error
    try:
        depth = 0
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
                raise RuleSetError(_place(path, event.start_mark), f"anchors and aliases are not allowed; {STARS}")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:  # before anything recurses into it
                raise RuleSetError(_place(path, event.start_mark), "nested too deeply")
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = _in_words(error)
        if mark is not None and TAB in _begins_with(text, mark.line):
            problem = "indented with a tab: use spaces"
        raise RuleSetError(_place(path, mark), f"not YAML: {problem}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RuleSetError(f"{path}:{line}", f"not YAML: character {error.character:#x} is not allowed") from error
    except (ValueError, OverflowError) as error:  # PyYAML 6.0 on "\\UFFFFFFFF"
        raise RuleSetError(str(path), "not YAML: an escape (\\U...) stands for no character") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise RuleSetError(str(path), f"not YAML: {type(error).__name__}") from error
    if node is None:
        raise RuleSetError(str(path), "the file is empty")
    return node


def _in_words(error: yaml.MarkedYAMLError) -> str:
    """What to mend in the line, where PyYAML's own words are for who writes parsers."""
    problem = error.problem or error.context or "it cannot be read"
    return next((words for own, words in PYYAML_IN_WORDS if own.search(problem)), problem)


def _begins_with(text: str, line: int) -> str:
    """The white space that a line begins with, counted from 0."""
    found = next((row for number, row in enumerate(text.splitlines()) if number == line), "")
    return found[: len(found) - len(found.lstrip())]


class _Plain:
    """Plain data of nodes; `problems` are what has none, with their lines."""

    def __init__(self) -> None:
        self.problems: list[tuple[int, str]] = []

    def plain(self, node: yaml.Node) -> object:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node)
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(item) for item in node.value]
        kind, text = node.tag.rpartition(":")[2], node.value
        if kind == "float" and text.lower().lstrip("+-") in {".nan", ".inf"}:
            return self._wrong(node, f"{text} is not a number to decide by")
        match kind:
            case "str":
                return text if _is_unicode(text) else self._wrong(node, HALF)
            case "bool":
                return text == "true"
            case "null":
                return None
            case "int":
                return int(text) if len(text) <= 18 else self._wrong(node, "the number is too large")
            case "float":
                number = float(text)
                return number if abs(number) < float("inf") else self._wrong(node, "the number is too large")
            case _:
                return self._wrong(node, f"tag {node.tag} is not allowed")

    def _mapping(self, node: yaml.MappingNode) -> dict[str, object]:
        found: dict[str, object] = {}
        spelled: dict[str, str] = {}
        for key, value in node.value:
            inside = self.plain(value)
            if not isinstance(key, yaml.ScalarNode):
                self._wrong(key, "a key must be a plain word")
            elif not _is_unicode(key.value):
                self._wrong(key, HALF)
            elif (first := spelled.setdefault(one_spelling(key.value), key.value)) in found:
                other = "" if first == key.value else ", in another spelling"
                self._wrong(key, f"key '{key.value}' stands twice{other}")
            else:
                found[key.value] = inside
        return found

    def _wrong(self, node: yaml.Node, problem: str) -> object:
        self.problems.append((node.start_mark.line + 1, problem))
        return None


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _place(path: Path, mark: yaml.error.Mark | yaml._yaml.Mark | None) -> str:
    return f"{path}:{mark.line + 1}" if mark is not None else str(path)


def _line_of(node: yaml.Node, location: Place, *, of_key: bool = False) -> int:
    """Line of the deepest part of the location that stands in the file (unions add parts that do not)."""
    line = node.start_mark.line
    for part in location:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == part), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            found = (node.value[part], node.value[part])
        else:
            found = None
        if found is not None:
            key, node = found
            line = (key if of_key else node).start_mark.line
    return int(line) + 1
