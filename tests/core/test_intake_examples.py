"""The field mappings in docs/messages.md find the ticket in whole payloads of the products that they are for."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from worker.core.rule_kinds import FieldRule
from worker.core.ticket import Intake, Ticket, parse_ticket

DOCUMENT = (Path(__file__).parents[2] / "docs/messages.md").read_text(encoding="utf-8")
PAYLOADS = Path(__file__).parent / "payloads"
PRODUCTS = {"zendesk": "Zendesk", "zammad": "Zammad", "open311": "Open311 GeoReport v2"}

EXPECTED = {
    "zendesk": Ticket(
        id="35436",
        text="Charged twice for March Hi, we were charged twice for March: once on the 1st and once on the 2nd, both "
        "times 49.00 EUR on the card that ends in 4417. Invoice is INV-30218. Could you please refund one of them? "
        "Thanks Marta",
        tenant="8447346621310",
        channel="email",
        created_at="2026-03-02T08:14:51Z",
    ),
    "zammad": Ticket(
        id="10081",
        text='Printer on the 3rd floor Hello, the printer says "paper jam, tray 2" & there is no paper in it. '
        "Colour < and> b/w are both affected. Regards, Emily",
        tenant="Nordlicht Logistics",
        channel="email",
        created_at="2026-03-02T08:20:35.282Z",
    ),
    "open311": Ticket(
        id="638344",
        text="은빛로 12길 가로등이 일주일째 꺼져 있습니다. 밤길이 너무 어두워요. 수리 부탁드립니다.",
        created_at="2026-03-02T17:25:02+09:00",
    ),
}


def documented_intake(product: str) -> Intake:
    found = re.search(rf"^### {re.escape(PRODUCTS[product])}$.*?```yaml\n(.*?)```", DOCUMENT, re.DOTALL | re.MULTILINE)
    assert found, f"docs/messages.md has no mapping for {product}"
    return Intake.model_validate(yaml.safe_load(found[1])["intake"])


def parsed(product: str) -> Ticket:
    return parse_ticket((PAYLOADS / f"{product}.json").read_bytes(), documented_intake(product), 500_000)


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_documented_mapping_finds_the_ticket_in_a_whole_payload(product: str) -> None:
    assert replace(parsed(product), metadata={}) == EXPECTED[product]


@pytest.mark.parametrize(
    ("product", "pointer", "equals"),
    [
        ("zendesk", "/tags/1", "vip"),
        ("zendesk", "/channel", "email"),
        ("zammad", "/customer/vip", True),
        ("zammad", "/tenant", "Nordlicht Logistics"),
        ("open311", "/service_code", "021"),
        ("open311", "/zipcode", 4524),
    ],
)
def test_an_override_reaches_the_fields_of_a_payload(product: str, pointer: str, equals: str | int | bool) -> None:
    rule = FieldRule(kind="field", name="r", pointer=pointer, equals=equals, then="escalate")
    assert rule.matches(parsed(product))
