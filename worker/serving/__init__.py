"""Commands that operate the worker: run it, check it, its topics, its decisions; none needs the offline extra."""

from worker.serving.cache import cache_flush, cache_stats
from worker.serving.deciding import decide, model_notice, own_ticket
from worker.serving.local import local
from worker.serving.processes import run, serve, serve_http, set_up_telemetry
from worker.serving.rule_sets import check, load_rules, prompt_view, rules_diff, rules_test, turns
from worker.serving.topics import audit, export, replay, rule_set_topics, send

__all__ = [
    "audit",
    "cache_flush",
    "cache_stats",
    "check",
    "decide",
    "export",
    "load_rules",
    "local",
    "model_notice",
    "own_ticket",
    "prompt_view",
    "replay",
    "rule_set_topics",
    "rules_diff",
    "rules_test",
    "run",
    "send",
    "serve",
    "serve_http",
    "set_up_telemetry",
    "turns",
]
