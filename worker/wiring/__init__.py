"""Composition root: settings to objects; the only room that names every concrete class."""

from worker.wiring.assemblies import Assembly, DecideAssembly, check_exposure, make_journal
from worker.wiring.cache import cache_secret, make_cache
from worker.wiring.desk import Desk
from worker.wiring.engines import (
    EMBEDDED_IN_FLIGHT,
    Engines,
    batch_items,
    close_engines,
    first_step,
    make_engines,
    make_sent,
    make_writer,
    tokenizer,
)
from worker.wiring.kafka import kafka_config, make_stream
from worker.wiring.questions import Calibrated, ask_once, ask_until_available, calibration_for, chat_turns, further_for
from worker.wiring.routing import Routing

__all__ = [
    "EMBEDDED_IN_FLIGHT",
    "Assembly",
    "Calibrated",
    "DecideAssembly",
    "Desk",
    "Engines",
    "Routing",
    "ask_once",
    "ask_until_available",
    "batch_items",
    "cache_secret",
    "calibration_for",
    "chat_turns",
    "check_exposure",
    "close_engines",
    "first_step",
    "further_for",
    "kafka_config",
    "make_cache",
    "make_engines",
    "make_journal",
    "make_sent",
    "make_stream",
    "make_writer",
    "tokenizer",
]
