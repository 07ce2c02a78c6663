"""Korean: what people are told about a decision, for desks that read Korean. English is `policy.REASONS`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from worker.core.envelope import Nearest, Reason
from worker.core.policy import lacks_bound

REASONS_KO: Mapping[str, str] = {
    "certified": "점수 {score}이(가) 인증된 기준 {threshold}보다 높습니다. {confidence} 신뢰도로 {promise}.",
    "override": "규칙 '{name}'에 따라 점수 없이 배정합니다.",
    "override_escalation": "규칙 '{name}'에 따라 담당자에게 보냅니다.",
    "answer_escalation": "규칙 '{name}'에 따라 담당자에게 보냅니다. 질문 '{question}': {what}.",
    "question_unanswered": "규칙 '{name}'에 따라 담당자에게 보냅니다. 질문 '{question}'에 "
    "믿을 만한 답이 없습니다({detail}).",
    "below_threshold": "점수 {score}이(가) 인증된 기준 {threshold}보다 높지 않습니다.",
    "inside_flip_band": "1순위와 2순위의 차이가 {margin}입니다. {gate} 아래에서는 다시 물으면 답이 바뀔 수 있습니다.",
    "uncertified_category": "분류 '{category}'에는 인증서가 없습니다: {detail}.",
    "certificate_too_weak": "분류 '{category}'의 인증서는 {stated}까지만 보장하는데, "
    "규칙은 {demanded}까지를 요구합니다.",
    "low_label_mass": "모든 답의 확률을 더하면 {mass}인데 {floor} 이상이어야 합니다. 모델이 다른 말을 하려고 합니다.",
    "label_not_returned": "엔진이 답 {labels}개 중 {missing}개의 점수를 돌려주지 않아, {what} 알 수 없습니다.",
    "none_of_the_above": "모델이 보기에 맞는 분류가 없습니다.",
    "uncalibrated": "이 규칙에는 보정 결과가 없습니다: {detail}.",
    "fingerprint_changed": "보정할 때와 달라진 것이 있습니다: {detail}.",
    "labels_untrusted": "엔진이 시작 점검을 통과하지 못했습니다: {detail}.",
    "too_long": "티켓이 너무 깁니다: {detail}.",
    "truncated": "티켓이 {tokens} 토큰을 넘어 앞부분과 끝부분만 읽었습니다.",
    "steered": "담당 부서가 아니라 배정 시스템에 하는 말일 수 있는 부분({parts})을 빼면 {what}.",
    "other_order": "분류의 순서를 바꾸어 물으면 모델은 '{category}'을(를) 고릅니다.",
    "over_quota": "이 고객이 1분 동안 {characters}자를 넘게 보냈습니다.",
    "engine_unavailable": "엔진에 연결할 수 없습니다: {detail}.",
    "engine_timeout": "제한 시간 {deadline}초 안에 점수를 얻지 못했습니다.",
    "engine_refused": "엔진이 이 티켓을 거절했습니다: {detail}.",
    "engine_dropped": "이 티켓을 처리하다가 엔진이 연결을 두 번 이상 끊었습니다.",
    "invalid_answer": "엔진의 답이 검증을 통과하지 못했습니다: {detail}.",
    "shadow_mode": "섀도 모드: 담당자가 결정하며, 추천을 보여 주지 않습니다.",
    "assist_mode": "보조 모드: 담당자가 결정합니다. 자동이었다면 '{category}'(으)로 배정되었을 티켓입니다.",
    "topic_refused": "토픽 '{topic}'이(가) 이 티켓을 받지 않았습니다: {detail}.",
    "internal_error": "이 티켓을 처리하는 중에 오류가 났습니다: {detail}.",
}
"""Every reason code of `policy.REASONS`, with the same things to fill in."""

WITHOUT_BOUND_KO: Mapping[str, str] = {
    "certified": "'{category}'(으)로 예측된 티켓은 점수와 관계없이(이 티켓: {score}) 모두 인증되었습니다. "
    "{confidence} 신뢰도로 {promise}.",
    "inside_flip_band": "1순위와 2순위의 차이가 {margin}입니다. 차이가 얼마이든 다시 물으면 답이 바뀔 수 있습니다.",
}
"""As `policy.WITHOUT_BOUND`."""

_PHRASES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(english), korean)
    for english, korean in (
        (r"(?P<x>.+) of all tickets are misrouted", "전체 티켓 중 잘못 배정되는 것은 {x} 이하입니다"),
        (r"(?P<x>.+) of such tickets are wrong", "이런 티켓 중 틀리는 것은 {x} 이하입니다"),
        (r"(?P<x>.+) of all tickets are misrouted \(delta (?P<d>.+)\)", "전체 티켓의 오배정 {x}(델타 {d})"),
        (r"(?P<x>.+) of such tickets are wrong \(delta (?P<d>.+)\)", "오류 {x}(델타 {d})"),
        (r"which label is the first", "어느 답이 1순위인지"),
        (r"whether the labels have enough probability", "답들의 확률이 충분한지"),
        (r"by how much the first label leads", "1순위가 얼마나 앞서는지"),
        (r"whether the score is above the threshold (?P<x>.+)", "점수가 기준 {x}보다 높은지"),
        (r"the answer", "답이 무엇인지"),
        (r"nothing is left", "남는 말이 없습니다"),
        (r"what is left does so, too", "남는 부분도 그렇습니다"),
        (r"it would go to '(?P<x>.+)'", "'{x}'(으)로 배정되었을 것입니다"),
        (r"it would not be routed", "배정되지 않았을 것입니다"),
        (r"one part", "한 곳"),
        (r"(?P<x>\d+) parts", "{x}곳"),
        (r"the expected level is (?P<x>.+), at least (?P<y>.+)", "예상 등급 {x}, 기준 {y} 이상"),
        (
            r"level (?P<n>.+) or higher has probability (?P<x>.+), at least (?P<y>.+)",
            "{n}등급 이상일 확률 {x}, 기준 {y} 이상",
        ),
        (r"'(?P<n>.+)' has probability (?P<x>.+), at least (?P<y>.+)", "'{n}'일 확률 {x}, 기준 {y} 이상"),
        (r"it was never calibrated", "보정한 적이 없습니다"),
        (r"it was not asked", "묻지 않았습니다"),
        (r"never routed: excluded before certification", "인증하기 전에 제외되어 배정하지 않습니다"),
        (
            r"suggest only: n=(?P<n>\d+), need other scores than these",
            "추천만 함: 표본 {n}건으로는 기준을 세울 수 없음",
        ),
        (r"suggest only: n=(?P<n>\d+), need (?P<x>\d+)", "추천만 함: 표본 {n}건, 필요한 표본 {x}건"),
        (
            r"suggest only: n=(?P<n>\d+), need (?P<x>\d+): label about (?P<more>\d+) more tickets, as they come",
            "추천만 함: 표본 {n}건, 필요한 표본 {x}건. 들어오는 순서대로 약 {more}건을 더 라벨링하세요",
        ),
        (
            r"suggest only: n=(?P<n>\d+), too few to tell what it needs",
            "추천만 함: 표본 {n}건은 무엇이 필요한지 알기에 너무 적음",
        ),
        (r"run `ticket-router calibrate`", "`ticket-router calibrate`를 실행하세요"),
    )
)
"""What the sentences are filled in with, as far as it is words of ours; names, numbers and details stay as they are."""


def in_korean(reason: Reason) -> str:
    """The sentence in Korean; in English where the record of it holds nothing to fill it in with."""
    values = {name: _phrase(value) for name, value in reason.values.items()}
    try:
        sentences = WITHOUT_BOUND_KO if lacks_bound(reason.code, values) else REASONS_KO
        return sentences[reason.code].format(**values)
    except KeyError:
        return reason.sentence


def nearest_in_korean(nearest: Nearest, title: str) -> str:
    """As `core.cards.nearest_in_english`."""
    to, score = f"'{title}'", f"{nearest.score:.4g}"
    certificate = nearest.certificate
    bar = None if certificate is None else certificate.threshold
    wants = f"점수가 기준 {bar:.4g}보다 높아야" if bar is not None else "점수와 관계없이"
    if nearest.gate == "none_of_the_above":
        return "모델이 보기에 맞는 분류가 없어, 어떤 점수로도 배정되지 않습니다."
    if certificate is None:
        return f"{to}에는 유효한 인증서가 없어, 어떤 점수로도 배정되지 않습니다. 이 티켓의 점수는 {score}입니다."
    if nearest.gate is None:
        passed = f"기준 {bar:.4g}보다 높아" if bar is not None else "기준을 넘어"
        return f"점수 {score}이(가) {passed} {to}(으)로 배정될 수 있었습니다."
    if nearest.gate == "threshold" and bar is not None:
        return f"{to}(으)로 배정되려면 {wants} 합니다. 이 티켓은 {score}로, {bar - nearest.score:.4g} 부족합니다."
    what = "모든 답의 확률의 합" if nearest.gate == "label_mass" else "1순위와 2순위의 차이"
    has = "–" if nearest.value is None else f"{nearest.value:.4g}"
    needs = "어떤 값으로도 통과할 수 없습니다" if nearest.needed is None else f"{nearest.needed:.4g}이(가) 필요합니다"
    rest = f"그다음 {wants} {to}(으)로 배정됩니다" if bar is None else f"그다음 {to}의 기준은 점수 {bar:.4g}입니다"
    return f"{what}이(가) {has}인데 {needs}. {rest}(이 티켓: {score})."


def _phrase(value: str) -> str:
    if " " not in value:  # a number or a name
        return value
    for english, korean in _PHRASES:
        found = english.fullmatch(value)
        if found is not None:
            return korean.format(**found.groupdict())
    return value
