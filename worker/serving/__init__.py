"""Commands that operate the worker: run it, check it, its topics, its decisions; none needs the offline extra."""

from worker.serving.cache import cache_flush, cache_stats
from worker.serving.processes import run, serve, serve_http, set_up_telemetry
from worker.serving.rule_sets import check, load_rules, prompt_view, rules_diff, rules_test, turns
from worker.serving.topics import audit, export, replay, rule_set_topics, send

__all__ = [
    "audit",
    "cache_flush",
    "cache_stats",
    "check",
    "export",
    "load_rules",
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
