"""The commands that need more than the worker does, and what to install where that is missing."""

from __future__ import annotations

from types import ModuleType

from worker import serving
from worker.cli.arguments import engine_settings
from worker.errors import ConfigError
from worker.settings import EngineName, Settings


def studies() -> ModuleType:
    """The commands that need more than the worker does. Raises ConfigError where that is not installed."""
    try:
        from worker import studies as module
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"this command needs '{error.name}': pip install 'ticket-router[offline,embedded]'"
        ) from error
    return module


def opened(engine: EngineName | None = None) -> tuple[Settings, ModuleType]:
    """Settings and commands for a study that asks an engine and prints what it finds. Raises ConfigError."""
    settings, study = engine_settings(engine), studies()
    serving.set_up_telemetry(settings, quiet=True)
    return settings, study
