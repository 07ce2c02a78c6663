"""Where a ticket first came in is believed only where it can be true."""

from __future__ import annotations

import pytest

from worker.core.envelope import Headers, Origin, origin_headers
from worker.ports import Partition
from worker.runtime.outputs import origin_in

HERE = Partition("tickets", 2)


def test_a_ticket_that_was_sent_in_again_keeps_its_origin() -> None:
    assert origin_in(origin_headers(Origin("tickets", 2, 7)), HERE, 90) == Origin("tickets", 2, 7)


@pytest.mark.parametrize(
    "headers",
    [
        (),
        origin_headers(Origin("elsewhere", 2, 7)),
        origin_headers(Origin("tickets", 1, 7)),
        origin_headers(Origin("tickets", 2, 90)),
        origin_headers(Origin("tickets", 2, 91)),
        origin_headers(Origin("tickets", 2, -7)),
        origin_headers(Origin("tickets", 2, 7))[:2],
        (*origin_headers(Origin("tickets", 2, 7))[:2], ("ticket-router-origin-offset", None)),
    ],
)
def test_an_origin_that_is_not_an_earlier_message_of_the_partition_is_not_believed(headers: Headers) -> None:
    assert origin_in(headers, HERE, 90) == Origin("tickets", 2, 90)
