"""Reports: self-contained pages that a browser opens without asking anybody for anything."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import struct
from pathlib import Path

import orjson
import pytest

from tests.core.sets import artefact
from tests.core.test_cards import RULES, UNSURE, card, envelope
from tests.offline.chromium import visit
from tests.offline.populations import IDS, question, scored
from tests.offline.test_backtest import log, side
from worker.core.cards import make_card
from worker.core.guarantees import n_min
from worker.core.policy import Calibration, decide
from worker.offline.backtest import backtest
from worker.offline.backtest_report import backtest_report
from worker.offline.calibrate import CalibrationResult, calibrate
from worker.offline.demo import card_of
from worker.offline.demo_summary import DemoSummary, DeskSummary, ExampleDecision
from worker.offline.evaluate import evaluate
from worker.offline.measures import share
from worker.offline.report import (
    Report,
    calibration_report,
    demo_report,
    evaluation_report,
    selftest_report,
)
from worker.offline.selftest import Flips, LabelToken, SelfTest
from worker.runtime.question import EasyCheck

NOW = "2026-01-02T03:04:05Z"
ATTACK = "<script>document.title='owned'</script><img src=https://example.org/x.png onerror=alert(1)> & \"quotes\""
KOREAN = "가로등이 꺼져서 골목이 너무 어둡습니다"
SCRIPTS = {
    "title": "document.title",
    "images": "[...document.images].map(i => i.complete && i.naturalWidth > 0)",
    "overflow": "document.documentElement.scrollWidth - document.documentElement.clientWidth",
    "scripts": "document.scripts.length",
    "text": "document.body.innerText",
    "korean": """(() => {
        const drawn = letter => {
            const canvas = document.createElement("canvas"), pen = canvas.getContext("2d");
            pen.font = "40px " + getComputedStyle(document.body).fontFamily;
            pen.fillText(letter, 10, 60);
            return canvas.toDataURL();
        };
        return drawn("가") !== drawn("나");
    })()""",
}


@functools.cache
def calibrated(n: int = 500, **changes: object) -> CalibrationResult:
    rows = scored(n, 1, categories=len(IDS) + 1)
    surest = max(range(len(rows)), key=lambda i: rows[i].mass * max(math.exp(z) for z in rows[i].logprobs))
    rows = [
        dataclasses.replace(
            row, text=f"{ATTACK if i % 2 else KOREAN} {row.text}", label=(row.label + (i == surest)) % 8
        )
        for i, row in enumerate(rows)
    ]
    return calibrate(question(none=True), rows, **{"seed": 1, "created_at": NOW, **changes})  # type: ignore[arg-type]


def examined() -> SelfTest:
    flips = [
        Flips(name, 200, k, share(k, 200), (0.01,) * k)
        for name, k in (("identical run 2", 2), ("order turned by 4", 27))
    ]
    return SelfTest(
        question=question(),
        n=200,
        unscored=0,
        easy=EasyCheck((0.9,) * 8, 8),
        labels=tuple(LabelToken(name, name, 100 + i) for i, name in enumerate(IDS)),
        repeats=(flips[0],),
        orders=(flips[1],),
        shares=tuple((name, (0.125, 0.1 + 0.05 * (i % 2))) for i, name in enumerate(IDS)),
        by_position=(0.2, *(0.8 / 7,) * 7),
        accuracy=share(160, 200),
        pairs=(),
        problems=(),
        cautions=("order matters <b>here</b>",),
    )


def demo() -> DemoSummary:
    result, shown = calibrated(), card(UNSURE)
    examples = (
        ExampleDecision(ATTACK, "en", "route", "billing", 0.97, "certified", "The score is above.", "billing"),
        ExampleDecision(KOREAN * 20, "ko", "escalate", "access", 0.41, "below_threshold", "No.", "network", shown),
        ExampleDecision("wrong one", None, "route", "travel", None, "override", "Rule 'x' routes.", "access"),
    )
    desk = DeskSummary(
        rule_set="desk",
        language="en",
        alpha=0.1,
        delta=0.1,
        labelled=268,
        tickets=90,
        routed={"billing": 20, "access": 11},
        escalated={"below_threshold": 50, "none_of_the_above": 9},
        dead_lettered=0,
        scored_routes=31,
        wrong=2,
        cache_hits=90,
        asked=180,
        tickets_per_s=21.3,
        p50_ms=120.0,
        p95_ms=410.5,
        certificates=result.certificates,
        examples=examples,
    )
    idle = dataclasses.replace(
        desk, rule_set="second", routed={}, scored_routes=0, wrong=0, certificates=(), examples=(), p50_ms=math.nan
    )
    return DemoSummary(NOW, "llama_cpp", "a model", "2 cores", 61.5, (desk, idle), ("Latencies are of <one> machine.",))


@functools.cache
def page(name: str) -> Report:
    match name:
        case "calibration":
            return calibration_report(calibrated(), examined())
        case "too few labels":
            return calibration_report(calibrated(20))
        case "misroutes, jointly":
            return calibration_report(calibrated(target="misroutes_per_ticket", joint=True))
        case "evaluation":
            return evaluation_report(
                evaluate(question(none=True), calibrated().artefact, scored(400, 2, categories=9, prefix="e"), seed=1)
            )
        case "selftest":
            return selftest_report(examined())
        case "backtest":
            by = side()
            return backtest_report(backtest([log(by)], side(0.6), by))
    return demo_report(demo())


def test_the_card_of_a_recorded_decision_is_the_workers() -> None:
    decided = envelope(decide(UNSURE, RULES, Calibration(artefact(RULES))))
    assert card_of(orjson.loads(decided.to_bytes()), RULES) == make_card(decided, RULES)
    assert card_of({"action": "route"}, RULES) is None


def test_a_card_is_shown_in_both_languages() -> None:
    html = page("demo").html
    assert "It would have been routed to &#39;Billing&#39; with a score above 0.5" in html
    assert "기준 0.5보다 높아야 합니다" in html and "점수 0.4211이(가) 인증된 기준 0.5보다 높지 않습니다." in html
    assert html.count("As people see them") == 1


PAGES = ("calibration", "too few labels", "misroutes, jointly", "evaluation", "selftest", "backtest", "demo")


@pytest.mark.parametrize("name", PAGES)
async def test_a_browser_opens_the_page_without_a_request_or_a_complaint(name: str, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(name).html, encoding="utf-8")
    widths = (1200, 420)
    for width, seen in zip(widths, await visit(file, tmp_path, SCRIPTS, widths), strict=True):
        outside = [url for url in seen.requests if not url.startswith(("file:", "data:"))]
        assert outside == [] and seen.complaints == []
        assert seen.requests[0] == file.as_uri()
        assert "owned" not in seen.values["title"] and seen.values["scripts"] == 0
        assert all(seen.values["images"])
        assert seen.values["korean"], "no Korean font: apt-get install fonts-noto-cjk"
        assert seen.values["overflow"] == 0, f"wider than a window of {width} pixels"
        height = struct.unpack(">I", seen.screenshot[20:24])[0]
        assert height > 600 and len(seen.screenshot) > 20_000
        if name in {"calibration", "demo"}:
            assert ATTACK[:40] in seen.values["text"] and KOREAN in seen.values["text"]


async def test_the_browser_test_sees_a_request_and_a_complaint(tmp_path: Path) -> None:
    file = tmp_path / "bad.html"
    file.write_text("<body><img src='http://127.0.0.1:9/x.png'><script>console.error('no'); missing()</script>")
    (seen,) = await visit(file, tmp_path, SCRIPTS)
    assert any(url.startswith("http://127.0.0.1:9/") for url in seen.requests)
    assert any("missing" in complaint for complaint in seen.complaints)
    assert not all(seen.values["images"])


@pytest.mark.parametrize("name", PAGES)
def test_no_page_refers_to_anything_outside_itself(name: str) -> None:
    html = page(name).html
    assert re.findall(r"""(?:src|href)=["'](?!data:)""", html) == []
    assert "default-src 'none'" in html and "@import" not in html and "url(" not in html


def test_ticket_texts_are_text() -> None:
    for name in ("calibration", "demo"):
        html = page(name).html
        assert "<script" not in html and "&lt;script&gt;" in html
        assert "<img src=https" not in html


def test_what_is_personal_in_a_ticket_is_not_in_the_page() -> None:
    result = calibrated()
    certifying = [
        dataclasses.replace(row, ticket=dataclasses.replace(row.ticket, text="call 010-1234-5678, hong@desk.example"))
        for row in result.certifying
    ]
    html = calibration_report(dataclasses.replace(result, certifying=certifying), examined()).html
    assert "call [PHONE], [EMAIL]" in html
    assert "1234-5678" not in html and "hong@" not in html


def test_the_same_result_gives_the_same_page_and_the_same_pictures() -> None:
    again = calibration_report(calibrated.__wrapped__(), examined())
    assert again == page("calibration")


def test_every_figure_of_the_page_is_a_picture_of_its_own_too() -> None:
    report = page("calibration")
    names = [figure.name for figure in report.figures]
    assert names == [
        "reliability", "confidence", "risk_coverage", "confusion", "positions", "certificates", "flips"
    ]  # fmt: skip
    for figure in report.figures:
        assert figure.png.startswith(b"\x89PNG") and figure.svg.startswith(b"<?xml")
        assert struct.unpack(">II", figure.png[16:24])[0] >= 600
    assert report.html.count("data:image/svg+xml;base64,") == len(names)


def test_the_page_states_every_certificate_and_what_is_missing() -> None:
    result = calibrated()
    html = calibration_report(result).html
    for certificate in result.certificates:
        if certificate.certified:
            assert (
                f"n={certificate.n}, m={certificate.m}, k={certificate.k}, lambda &gt; {certificate.lambda_:.4g}"
                in html
            )
    poor = calibrated(20)
    pool = next(c for c in poor.certificates if c.basis == "pool")
    assert pool.need is not None and pool.need >= n_min(0.1, 0.1)
    html = calibration_report(poor).html
    assert f"suggest only: n={pool.n}, need {pool.need}" in html and "Nothing is certified" in html


def test_promises_assumptions_and_ends_stand_in_both_languages() -> None:
    html = page("calibration").html
    for words in ("It promises", "It assumes", "It is void when", "약속하는 것", "전제하는 것", "효력을 잃는 때"):
        assert words in html
    assert 'lang="ko"' in html


def test_fifty_categories_fit_on_the_page(tmp_path: Path) -> None:
    ids = tuple(f"category_number_{'abcdefghij'[i // 10]}{'abcdefghij'[i % 10]}" for i in range(50))
    result = calibrate(question(ids), scored(1500, 1, categories=50), seed=1, created_at=NOW)
    report = calibration_report(result)
    assert len(report.html) < 4_000_000
