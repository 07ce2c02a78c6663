"""Files people write: refused whole, with file, line and what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.adapters.files import load_artefact, load_labelled, load_rule_set, write_atomically
from worker.adapters.yaml_strict import load_model
from worker.core.categories import PATTERNS_IN_WORDS, CategorySet
from worker.core.questions import Questions
from worker.core.rules import Rules
from worker.errors import ArtefactError, ConfigError, RuleSetError

CATEGORIES = """\
id: desk
version: 1
language: en
prompt:
  instruction: Sort them.
categories:
  - id: billing
    name: Billing
    description: money
    label: NO
  - id: login
    name: Login
    description: sign-in
    label: login
"""
RULES = """\
version: 1
alpha: 0.1
delta: 0.1
"""


def write(folder: Path, categories: str = CATEGORIES, rules: str = RULES) -> Path:
    (folder / "categories.yaml").write_text(categories, encoding="utf-8")
    (folder / "rules.yaml").write_text(rules, encoding="utf-8")
    return folder


def test_a_label_called_NO_stays_a_word(tmp_path: Path) -> None:
    rule_set = load_rule_set(write(tmp_path))
    assert rule_set.categories.categories[0].label == "NO"
    assert rule_set.input_topic == "tickets.desk"
    assert rule_set.categories.topic("billing") == "desk.billing"


BAD: list[tuple[str, str, int, str]] = [
    ("duplicate key", "version: 1\nalpha: 0.1\ndelta: 0.1\nalpha: 0.5\n", 4, "stands twice"),
    ("not a number", "version: 1\nalpha: .nan\ndelta: 0.1\n", 2, "not a number"),
    ("infinite", "version: 1\nalpha: 0.1\ndelta: -.inf\n", 3, "not a number"),
    ("alias", "version: &a 1\nalpha: 0.1\ndelta: 0.1\n", 1, "anchors"),
    ("tag", "version: 1\nalpha: !!python/object:os.system x\ndelta: 0.1\n", 2, "tag"),
    ("unknown key", "version: 1\nalpha: 0.1\ndelta: 0.1\ngate:\n  x: 1\n", 4, "not permitted"),
    ("string for a number", 'version: 1\nalpha: "0.1"\ndelta: 0.1\n', 2, "number"),
    ("out of bounds", "version: 1\nalpha: 0.9\ndelta: 0.1\n", 2, "less than or equal"),
    ("broken", "version: 1\nalpha: [0.1\ndelta: 0.1\n", 3, "not YAML"),
    ("two documents", "version: 1\nalpha: 0.1\ndelta: 0.1\n---\na: 1\n", 4, "not YAML"),
    ("unknown category", "version: 1\nalpha: 0.1\ndelta: 0.1\ncategories:\n  refund: {alpha: 0.01}\n", 0, "refund"),
    ("huge number", "version: 99999999999999999999999\nalpha: 0.1\ndelta: 0.1\n", 1, "too large"),
    (
        "unknown kind",
        "version: 1\nalpha: 0.1\ndelta: 0.1\noverrides:\n  - kind: regex\n    name: x\n",
        5,
        "expected tags",
    ),
    (
        "keyword that routes",
        "version: 1\nalpha: 0.1\ndelta: 0.1\noverrides:\n  - kind: keyword\n    name: x\n    any: [y]\n"
        "    then: route\n",
        8,
        "not permitted",
    ),
    ("a loop", "version: 1\nalpha: 0.1\ndelta: 0.1\ntopics:\n  input: desk.human\n", 0, "round for ever"),
    ("same topic twice", "version: 1\nalpha: 0.1\ndelta: 0.1\ntopics:\n  human: desk.billing\n", 5, "different topics"),
    ("a topic of dots", "version: 1\nalpha: 0.1\ndelta: 0.1\ntopics:\n  human: ..\n", 5, "Kafka does not take '..'"),
    ("a topic of one dot", "version: 1\nalpha: 0.1\ndelta: 0.1\ntopics:\n  human: .\n", 5, "Kafka does not take '.'"),
    ("a long topic", f"version: 1\nalpha: 0.1\ndelta: 0.1\ntopics:\n  input: {'x' * 250}\n", 5, "250 characters"),
    ("a topic of other characters", "version: 1\nalpha: 0.1\ndelta: 0.1\ntopics:\n  input: a b\n", 5, "ASCII letters"),
    (
        "the broker's own topic",
        "version: 1\nalpha: 0.1\ndelta: 0.1\ntopics:\n  human: __consumer_offsets\n",
        5,
        "the broker's own",
    ),
    (
        "topics that are one to Kafka",
        "version: 1\nalpha: 0.1\ndelta: 0.1\ntopics:\n  human: desk_billing\n",
        5,
        "'desk.billing' and 'desk_billing' differ in '.' and '_' only",
    ),
    (
        "two rules of one name",
        "version: 1\nalpha: 0.1\ndelta: 0.1\noverrides:\n"
        "  - {kind: keyword, name: Gas, any: [gas]}\n  - {kind: keyword, name: gas, any: [smell]}\n",
        6,
        "rule name used twice: Gas and gas (they read the same)",
    ),
    ("half a character", 'version: 1\nalpha: 0.1\ndelta: 0.1\ntopics:\n  human: "\\ud800"\n', 5, "half a character"),
    ("an escape of nothing", 'version: 1\nalpha: "\\UFFFFFFFF"\n', 0, "stands for no character"),
    ("a tab", "version: 1\nalpha: 0.1\ntopics:\n\tinput: a\n", 4, "indented with a tab: use spaces"),
    ("a control character", "version: 1\nalpha: \x07\n", 2, "0x7 is not allowed"),
    ("a number beyond all bounds", "version: 1\nalpha: 1e999\ndelta: 0.1\n", 2, "too large"),
    ("a list", "- version: 1\n", 1, "should be an object"),
    ("a Korean key", "version: 1\nalpha: 0.1\ndelta: 0.1\n규칙: 1\n", 4, "규칙: no such key"),
    ("a misspelt key", "version: 1\nalpha: 0.1\ndelta: 0.1\noverides: []\n", 4, "did you mean overrides?"),
    (
        "a key in two spellings",
        "version: 1\nalpha: 0.1\ndelta: 0.1\noverrides:\n  - kind: keyword\n    name: x\n    any: [x]\n    tests:\n"
        "      - {name: y, text: x, expect: {action: score}, metadata: {caf\u00e9: 1, cafe\u0301: 2}}\n",
        9,
        "stands twice, in another spelling",
    ),
]


@pytest.mark.parametrize(("text", "line", "problem"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_rules_are_refused_with_file_and_line(tmp_path: Path, text: str, line: int, problem: str) -> None:
    with pytest.raises(RuleSetError) as caught:
        load_rule_set(write(tmp_path, rules=text))
    assert "rules.yaml" in caught.value.where
    if line:
        assert caught.value.where.endswith(f":{line}"), str(caught.value)
    assert problem in str(caught.value)


def test_everything_wrong_with_a_rule_set_file_is_listed_with_its_line(tmp_path: Path) -> None:
    wrong = "version: one\nalpha: 0.9\ndelta: 0.1\n규칙: 1\ntopics:\n  human: ..\n"
    with pytest.raises(RuleSetError) as caught:
        load_rule_set(write(tmp_path, rules=wrong))
    first, *rest = str(caught.value).splitlines()
    assert first.startswith(f"{tmp_path}/rules.yaml:1: version: ")
    assert [line.strip().removeprefix(f"{tmp_path}/rules.yaml:").split(":")[0] for line in rest] == ["2", "4", "6"]
    with pytest.raises(RuleSetError) as caught:
        load_rule_set(write(tmp_path, rules="version: 1\nversion: 2\nalpha: .inf\nc: 1\nc: 2\n"))
    assert [line.rpartition("rules.yaml:")[2][:1] for line in str(caught.value).splitlines()] == ["2", "3", "5"]


def test_many_problems_are_listed_up_to_a_score(tmp_path: Path) -> None:
    unknown = "".join(f"key{n}: 1\n" for n in range(1000))
    with pytest.raises(RuleSetError, match=r"\.\.\. and 980 more") as caught:
        load_rule_set(write(tmp_path, rules=f"version: 1\nalpha: 0.1\ndelta: 0.1\n{unknown}"))
    assert len(str(caught.value).splitlines()) == 21


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    assert load_rule_set(write(tmp_path, CATEGORIES, "\ufeff" + RULES)).rules.version == 1
    (tmp_path / "rules.yaml").write_bytes(RULES.encode("utf-16"))
    with pytest.raises(RuleSetError, match="not UTF-8 at byte 0: save it as UTF-8"):
        load_rule_set(tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bomb", ["a: " + "[" * 500_000, "a: &a [x]\n" + "b: [*a, *a]\n" * 100_000, "? " * 200_000])
def test_a_file_that_would_explode_is_refused_at_once(tmp_path: Path, bomb: str) -> None:
    with pytest.raises(RuleSetError, match=r"rules\.yaml:1: (nested too deeply|anchors)"):
        load_rule_set(write(tmp_path, rules=bomb))


def test_names_that_read_the_same_are_refused_at_the_second(tmp_path: Path) -> None:
    for first, second in (
        ("Café", "Cafe\u0301"),
        ("Billing", "billing"),
        ("Ａ", "A"),
        ("수도", "\u1109\u116e\u1103\u1169"),
    ):
        alike = CATEGORIES.replace("name: Billing", f"name: {first}").replace("name: Login", f"name: {second}")
        with pytest.raises(RuleSetError, match=r"categories\.yaml:12: name used twice: .*read the same"):
            load_rule_set(write(tmp_path, alike))
    with pytest.raises(RuleSetError, match=r"categories\.yaml:14: label used twice"):
        load_rule_set(write(tmp_path, CATEGORIES.replace("NO", "é").replace("label: login", "label: e\u0301")))
    with pytest.raises(RuleSetError, match=r"categories\.yaml:11: category id used twice: billing"):
        load_rule_set(write(tmp_path, CATEGORIES.replace("id: login", "id: billing")))


@pytest.mark.parametrize(
    ("questions", "rule", "where", "problem"),
    [
        ("id: text", "", "questions.yaml:2", "'text' is a column"),
        ("id: label", "", "questions.yaml:2", "'label' is a column"),
        ("id: language", "", "questions.yaml:2", "'language' is a column"),
        ("id: urgent", "topic: ..", "rules.yaml:11", "Kafka does not take '..'"),
        ("id: urgent", "topic: tickets.desk", "rules.yaml:11", "that of the input"),
        ("id: urgent", "topic: desk.dead-letter", "rules.yaml:11", "that of dead letters"),
        ("id: urgent", "topic: desk.decisions", "rules.yaml:11", "that of decisions"),
        ("id: other", "", "rules.yaml:7", "no question 'urgent'"),
    ],
)
def test_a_question_or_a_rule_over_its_answers_that_would_collide_is_refused_where_it_stands(
    tmp_path: Path, questions: str, rule: str, where: str, problem: str
) -> None:
    (tmp_path / "questions.yaml").write_text(
        f"questions:\n  - {questions}\n    kind: yes_no\n    ask: Is it?\n    cue: 'Urgent:'\n", encoding="utf-8"
    )
    rules = f"{RULES}answers:\n  - kind: answer\n    name: x\n    question: urgent\n    is: yes\n    probability: 0.5\n"
    with pytest.raises(RuleSetError) as caught:
        load_rule_set(write(tmp_path, rules=f"{rules}    then: escalate\n    {rule}\n"))
    assert caught.value.where == f"{tmp_path}/{where}"
    assert problem in caught.value.problem


def test_a_deep_file_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuleSetError, match="deeply"):
        load_rule_set(write(tmp_path, rules="a: " + "[" * 40 + "]" * 40))
    with pytest.raises(RuleSetError):
        load_rule_set(write(tmp_path, rules="a: " + "[" * 9000 + "]" * 9000))
    with pytest.raises(RuleSetError, match="no such rule set folder"):
        load_rule_set(tmp_path / "nowhere")


def test_labels_that_stand_twice_and_none_with_a_topic_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuleSetError, match="label used twice: login"):
        load_rule_set(write(tmp_path, CATEGORIES.replace("label: NO", "label: login")))
    with pytest.raises(RuleSetError, match="has no topic"):
        load_rule_set(write(tmp_path, CATEGORIES.replace("id: login", "id: none\n    topic: x")))


def test_labelled_tickets_are_read_from_csv_and_jsonl(tmp_path: Path) -> None:
    table, lines = tmp_path / "t.csv", tmp_path / "t.jsonl"
    table.write_text('id,text,label,lang\n1,"Hello, you",billing,en\n2,안녕,none,ko\n', encoding="utf-8")
    lines.write_text('{"id": 1, "text": "Hello, you", "label": "billing", "language": "en"}\n\n', encoding="utf-8")
    rows = load_labelled(table, ["billing"])
    assert [(t.id, t.text, t.label, t.language) for t in rows] == [
        ("1", "Hello, you", "billing", "en"),
        ("2", "안녕", "none", "ko"),
    ]
    assert load_labelled(lines, ["billing"]) == rows[:1]


def test_everything_wrong_with_a_labelled_file_is_listed_at_once(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("id,text,label\n1,,billing\n2,hi,refund\n3,hi,billing\n3,ho,billing\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_labelled(table, ["billing"])
    message = str(caught.value)
    for part in ("line 2: no text", "line 3: label 'refund'", "id '3' stands 2 times", "nothing was used"):
        assert part in message
    table.write_text("id,body,label\n1,x,billing\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="no column text; the columns are id, body, label"):
        load_labelled(table, ["billing"])


def test_every_line_that_is_no_json_is_listed_together_with_what_else_is_wrong(tmp_path: Path) -> None:
    lines = tmp_path / "t.jsonl"
    lines.write_text('{"text": "x", "label": "billing"}\nnot json\n{"text": ""}\n[1]\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="3 problems") as caught:
        load_labelled(lines, ["billing"])
    for part in ("line 2: not JSON", "line 3: no text", "line 4: not a JSON object"):
        assert part in str(caught.value)


def test_a_file_without_the_questions_column_says_that_another_was_read(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("text,label\na,billing\nb,yes\nc,login\n", encoding="utf-8")
    said = "there is no column 'urgent', so column 'label' was read in its place, and 2 of its values are no answers"
    with pytest.raises(ConfigError, match=said) as caught:
        load_labelled(table, ["yes", "no"], "urgent")
    assert "add a column 'urgent'" in str(caught.value)
    table.write_text("text,kind\na,billing\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="no column 'urgent' with its answers, and no column label to read instead"):
        load_labelled(table, ["yes", "no"], "urgent")


def test_an_artefact_is_absent_or_trusted_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    assert load_artefact(path) is None
    path.write_bytes(b"{}")
    with pytest.raises(ArtefactError, match="calibration.json"):
        load_artefact(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            "text,label\n프린터가 고장났어요,bug\n".encode("cp949"),
            "it looks like CP949, .*`iconv -f CP949 -t UTF-8 t.csv",
        ),
        (
            "text\tlabel\nhi\tbug\n".encode("utf-16"),
            "it looks like UTF-16, .*Excel by Save as > CSV UTF-8, or by `iconv",
        ),
        (b"PK\x03\x04\x14\x00\x06\x00\xff\xfe", "it is an Excel workbook"),
        ("text,label\nM\xfcll,bug\n".encode("latin-1"), "not UTF-8: save it as UTF-8, in Excel by"),
        (b"id;text;label\n1;hi;bug\n", "'id;text;label' is one column, as semicolons stand in it in place of commas"),
        (b"Message;Category\nhi;bug\n", "as semicolons stand in it"),
        (b"text\tlabel\nhi\tbug\n", "as tabs stand in it"),
        (
            b"Message,Category\nhi,bug\n",
            r"the columns are Message, Category; name them text \(the ticket\) and, .* label",
        ),
        (
            b"text,category\nhi,bug\n",
            r"no column label; the columns are text, category; name them .* label \(its category",
        ),
        (b"My printer is broken since Monday.\nI cannot log in\n", "so it looks like plain text"),
        (b"Hello, my printer is broken since Monday.\nI cannot log in\n", "so it looks like plain text"),
        (b"", "the file is empty"),
    ],
)
def test_a_file_in_another_form_is_told_what_it_is_and_how_to_save_it(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=said) as refused:
        load_labelled(path, ["bug"])
    assert "codec" not in str(refused.value)


RULES_HEAD = "version: 1\nalpha: 0.1\ndelta: 0.1\n"


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        (
            "version: 1\nalpha: 10\ndelta: 5%\n",
            2,
            "alpha: Input should be less than or equal to 0.5: 10 % is written 0.10",
        ),
        ("version: 1\nalpha: 0.1\ndelta: 5%\n", 3, "delta: Input should be a valid number: 5 % is written 0.05"),
        ("version: 1\nalpha: 0.1\ndelta: 700\n", 3, r"delta: Input should be less than or equal to 0.5$"),
        (RULES_HEAD + "overrides:\n  - a: 1\n - b: 1\n", 6, "indented in another way than those it belongs to"),
        (RULES_HEAD + "topics:\n  human: a: b\n", 5, "a ': ' too many"),
        (RULES_HEAD + "topics:\n  human: 'it's'\n", 5, "a quotation mark ends the text too early"),
        (RULES_HEAD + "topics:\n  human: *x\n", 5, r"put a text that begins with \* or & in quotation marks"),
        (RULES_HEAD + "topics:\n  human: @x\n", 5, "must not begin with this character: put it in quotation marks"),
        (
            RULES_HEAD + "categories:\n  Papers Office:\n    alpha: 0.1\n",
            5,
            "'Papers Office' cannot stand .* papers_office",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_what_to_write(tmp_path: Path, text: str, line: int, said: str) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(RuleSetError, match=said) as refused:
        load_model(path, Rules)
    assert f"{path}:{line}: " in str(refused.value)
    assert "<block" not in str(refused.value) and "pattern" not in str(refused.value)


def test_every_pattern_of_a_rule_set_is_told_in_words() -> None:
    def patterns(schema: object) -> set[str]:
        if isinstance(schema, dict):
            own = {schema["pattern"]} if isinstance(schema.get("pattern"), str) else set()
            keys = set(schema.get("patternProperties", ()))
            return own.union(keys, *map(patterns, schema.values()))
        return set().union(*map(patterns, schema)) if isinstance(schema, list) else set()

    found = set().union(*(patterns(model.model_json_schema()) for model in (CategorySet, Rules, Questions)))
    assert len(found) >= 4 and found == PATTERNS_IN_WORDS.keys()
