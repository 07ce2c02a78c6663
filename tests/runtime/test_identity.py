"""What identifies a ticket is where it came in: equal ids, missing keys and unknown tenants are nobody's fault."""

from __future__ import annotations

import orjson

from tests.runtime.desks import RULES, broker, make_worker
from tests.runtime.engines import ScriptedEngine
from tests.waiting import until
from worker.core.envelope import DECISION_HEADER
from worker.runtime.service import running


async def test_tickets_with_the_same_id_another_body_no_key_or_an_unknown_tenant_all_end_as_themselves() -> None:
    on = broker(partitions=1)
    bodies: list[dict[str, object]] = [
        {"id": "1", "text": "label 0"},
        {"id": "1", "text": "label 0"},
        {"id": "1", "text": "label 1, another body"},
        {"id": "1", "text": "label 0", "tenant": "nobody knows them"},
        {"text": "label 0, without an id"},
        {"id": 1, "text": "label 0"},
    ]
    for number, body in enumerate(bodies):
        on.produce(RULES.input_topic, b"k" if number % 2 else None, orjson.dumps(body))
    worker = make_worker(on, ScriptedEngine())
    async with running(worker):
        await until(lambda: worker.status().settled == len(bodies))
    billing, login = on.records("desk.billing"), on.records("desk.login")
    assert [orjson.loads(record.value or b"") for record in billing] == [b for n, b in enumerate(bodies) if n != 2]
    assert [orjson.loads(record.value or b"") for record in login] == [bodies[2]]
    decisions = [orjson.loads(dict(record.headers)[DECISION_HEADER] or b"") for record in (*billing, *login)]
    assert len({decision["decision_id"] for decision in decisions}) == len(bodies)
