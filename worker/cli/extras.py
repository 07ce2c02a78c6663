"""The commands that need more than the worker does, and what to install where that is missing."""

from __future__ import annotations

from types import ModuleType

from worker.errors import ConfigError


def studies() -> ModuleType:
    """The commands that need more than the worker does. Raises ConfigError where that is not installed."""
    try:
        from worker import studies as module
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"this command needs '{error.name}': pip install 'ticket-router[offline,embedded]'"
        ) from error
    return module
