"""Process configuration: alone knows the environment variables ROUTER_*, their units, bounds and defaults."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_args, get_origin
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, Field, PlainSerializer, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    DotEnvSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from worker.core.modes import Mode
from worker.errors import ConfigError

PREFIX = "ROUTER_"
ENV_FILE = ".env"
MIN_SECRET_CHARS = 16
HIGHEST_PORT = 65_535
_SECRET_PROPERTY = re.compile(r"password|secret|token|credential|\.pem$|oauthbearer\.config", re.IGNORECASE)


class ClientProperties(dict[str, str | int | float | bool]):
    """Properties for the Kafka client, whose secrets show neither in `repr` nor in a dump."""

    def redacted(self) -> dict[str, str | int | float | bool]:
        return {name: "**********" if _SECRET_PROPERTY.search(name) else value for name, value in self.items()}

    def __repr__(self) -> str:
        return repr(self.redacted())


def _port(text: str) -> None:
    """Raises ValueError where these digits are no port that can be connected to."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:6]) <= HIGHEST_PORT and len(text) <= 5):
        raise ValueError(f"the port is none: write a number from 1 to {HIGHEST_PORT}")


def _check_url_port(parts: SplitResult) -> None:
    """Raises ValueError; what urlsplit says of a port quotes the address, which may hold a password."""
    colon, port = parts.netloc.rpartition("@")[2].rpartition("]")[2].rpartition(":")[1:]
    if colon and port:
        _port(port)


def _split(value: str, form: str) -> SplitResult:
    try:
        return urlsplit(value)
    except ValueError:  # quotes the address
        raise ValueError(f"no address: write {form}") from None


def _http_url(value: str) -> str:
    parts = _split(value, "http://host:port")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("write http://host:port or https://host:port")
    _check_url_port(parts)
    if parts.username or parts.password:
        raise ValueError("a key does not belong into the address: set ROUTER_ENGINE_API_KEY")
    return value.rstrip("/")


def _http_urls(value: str) -> str:
    """Each one is looked at: a key in the second address must not slip in behind the first."""
    urls = [_http_url(part.strip()) for part in value.split(",") if part.strip()]
    if not urls:
        raise ValueError("write http://host:port, several separated by commas")
    if len(set(urls)) < len(urls):
        raise ValueError("an address stands twice: it would get twice the load")
    return ",".join(urls)


def _redis_url(secret: SecretStr) -> SecretStr:
    parts = _split(secret.get_secret_value(), "redis://host:port/0")
    if parts.scheme in ("redis", "rediss"):
        _check_url_port(parts)
    return secret


def _brokers(value: str) -> str:
    """The client itself would go on asking for ever at a port that cannot be."""
    for broker in value.split(","):
        host, colon, port = broker.strip().rpartition("://")[2].rpartition("]")[2].rpartition(":")
        if colon and ":" not in host:
            _port(port)
    return value


def _bearer_token(secret: SecretStr) -> SecretStr:
    token = secret.get_secret_value()
    if len(token) < MIN_SECRET_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(
            f"at least {MIN_SECRET_CHARS} printable ASCII characters without spaces (openssl rand -hex 32)"
        )
    return secret


EngineName = Literal["sglang", "llama_cpp", "openai_compat", "systemone"]
HttpUrls = Annotated[str, AfterValidator(_http_urls)]
Properties = Annotated[
    dict[str, str | int | float | bool],
    AfterValidator(ClientProperties),
    PlainSerializer(lambda properties: ClientProperties(properties).redacted()),
]


class _DotEnvSource(DotEnvSettingsSource):
    """A `.env` file read like the environment: what is not ours in it belongs to somebody else."""

    def __call__(self) -> dict[str, Any]:
        return EnvSettingsSource.__call__(self)


class Settings(BaseSettings):
    """What differs from one deployment to the next; what decides about tickets is in the rule set."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_file=ENV_FILE,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        validate_default=True,
    )

    mode: Mode = Field(
        "auto",
        description="A brake: `assist` or `shadow` for every category that the rule set has in a less strict mode.",
    )

    kafka_bootstrap_servers: Annotated[str, AfterValidator(_brokers)] | None = Field(
        None, description="Brokers, `host:port`, separated by commas."
    )
    kafka_group_id: str | None = Field(None, description="Consumer group; unset: `ticket-router.<rule set>`.")
    kafka_input_topic: str | None = Field(None, description="Topic with the tickets; unset: that of the rule set.")
    delivery: Literal["exactly_once", "at_least_once"] = Field(
        "exactly_once",
        description="`exactly_once`: readers with `isolation.level=read_committed` see every output once.",
    )
    kafka_session_timeout_ms: int = Field(
        45_000, ge=1_000, le=1_800_000, description="A worker silent for so long loses its partitions."
    )
    kafka_assignment_strategy: Literal["cooperative-sticky", "range", "roundrobin"] = Field(
        "cooperative-sticky", description="How the group shares partitions; the same on every worker."
    )
    kafka_group_protocol: Literal["classic", "consumer"] = Field(
        "classic", description="`consumer` is KIP-848; it needs Kafka 4.1 or later, which then shares the partitions."
    )
    kafka_group_instance_id: str | None = Field(
        None, description="Static membership: a name of its own for each worker, kept over restarts."
    )
    kafka_properties: Properties = Field(
        default_factory=ClientProperties,
        description='More client properties as JSON, such as `{"security.protocol": "SASL_SSL"}`.',
    )
    max_output_bytes: int = Field(
        1_000_000, ge=10_000, le=1_000_000_000, description="Largest message produced; at most what the brokers take."
    )

    redis_url: Annotated[SecretStr, AfterValidator(_redis_url)] | None = Field(
        None, description="`redis://user:password@host:6379/0`, or `rediss://` for TLS; unset: a cache in memory."
    )
    redis_timeout_ms: int = Field(
        50, ge=1, le=10_000, description="Longest wait for the cache, connecting included; raise it for TLS."
    )
    cache_ttl_s: int = Field(7 * 86_400, ge=1, le=366 * 86_400, description="Scores are kept for so long.")
    cache_memory_bytes: int = Field(
        16 * 2**20, ge=0, le=2**36, description="Most memory for scores in the worker itself, before Redis is asked."
    )
    cache_secret: SecretStr | None = Field(
        None,
        min_length=MIN_SECRET_CHARS,
        description=f"Keys and signs cached scores; one for all workers, at least {MIN_SECRET_CHARS} characters.",
    )

    engine: EngineName = Field(
        "sglang",
        description="What scores: an SGLang server, the embedded llama.cpp, an OpenAI-compatible server (vLLM, "
        "llama.cpp's), or a decision API (docs/engines.md).",
    )
    engine_url: HttpUrls | None = Field(
        None,
        description="Base URL of the engine's server; several, separated by commas, share the work and run one model.",
    )
    engine_api_key: SecretStr | None = Field(None, description="Sent to the engine as a bearer token.")
    engine_ca_file: Path | None = Field(
        None,
        description="PEM file with the authorities that are believed for `https://` engines; unset: certifi's.",
    )
    engine_model: str | None = Field(
        None,
        min_length=1,
        description="Name of the model, where an OpenAI-compatible server or decision API has several.",
    )
    engine_timeout_s: float = Field(30.0, gt=0, le=600, description="Longest wait for one answer of the engine.")
    engine_connections: int = Field(16, ge=1, le=1_024, description="Most connections to an engine.")
    engine_attempts: int = Field(3, ge=1, le=10, description="Attempts for a ticket before it goes to people.")
    tokenizer_file: Path | None = Field(
        None,
        description="The model's own tokenizer.json (extra `ids`): tickets are tokenized here, so that none can write "
        "a control token, and sent as ids.",
    )
    send_ids: bool = Field(
        True,
        description="With a tokenizer file: `false` sends text in which it found no control token; ids need a "
        "calibration of their own.",
    )
    engine_threads: int = Field(2, ge=1, le=256, description="Threads of the embedded engine.")
    engine_model_path: Path | None = Field(
        None, description="GGUF file of the embedded engine; unset: the packaged model."
    )

    batch_items: int = Field(32, ge=1, le=1_024, description="Most tickets in one request to the engine.")
    batch_wait_ms: float = Field(5.0, ge=0, le=1_000, description="Longest wait for a batch to fill.")
    batch_concurrency: int = Field(16, ge=1, le=1_024, description="Most requests at an engine at once.")

    max_in_flight: int = Field(
        2_048,
        ge=1,
        le=1_000_000,
        description="Most tickets taken in and not yet settled; fewer while the engine is slow.",
    )
    max_in_flight_bytes: int = Field(
        64 * 2**20, ge=2**20, le=2**40, description="Most bytes of tickets taken in and not yet settled."
    )
    max_ticket_bytes: int = Field(500_000, ge=1_000, le=2**30, description="A larger message is a dead letter.")
    ticket_deadline_s: float = Field(
        60.0, gt=0, le=3_600, description="A ticket that was not scored within it goes to people."
    )
    settle_interval_ms: int = Field(
        200, ge=1, le=60_000, description="Outputs are produced and offsets committed so often."
    )
    stalled_s: float = Field(
        120.0, ge=5, le=86_400, description="A partition in which nothing moves for so long makes the worker not ready."
    )
    unassigned_s: float = Field(
        60.0, ge=1, le=86_400, description="A worker without partitions for so long says so in its log and metrics."
    )
    dead_letter_limit: float = Field(
        0.5,
        ge=0,
        le=1,
        description="A larger share of dead letters among the last 200 messages ends the worker; `0`: none does.",
    )
    drain_s: float = Field(20.0, ge=0, le=600, description="Time to finish what is in flight after SIGTERM.")
    on_engine_down: Literal["wait", "escalate"] = Field(
        "wait", description="While the engine is down, tickets wait in Kafka, or go to people after a while."
    )
    max_wait_s: float = Field(
        600.0, ge=0, le=86_400, description="With `escalate`: how long a ticket waits for the engine before it goes."
    )

    http_host: str = Field("127.0.0.1", min_length=1, description="Address of the health and metrics server.")
    http_port: int = Field(8080, ge=0, le=65_535, description="Its port; 0 takes any that is free.")

    serve_host: str = Field(
        "127.0.0.1", min_length=1, description="Address of `ticket-router serve`; any but this machine's needs a token."
    )
    serve_port: int = Field(8081, ge=0, le=65_535, description="Its port; 0 takes any that is free.")
    serve_token: Annotated[SecretStr, AfterValidator(_bearer_token)] | None = Field(
        None, description=f"Clients of `serve` send it as a bearer token; at least {MIN_SECRET_CHARS} characters."
    )
    serve_concurrency: int = Field(
        64, ge=1, le=10_000, description="Most requests that `serve` answers at once; more get 503."
    )
    serve_deadline_s: float = Field(
        10.0, gt=0, le=600, description="A request to `serve` that is not answered within it gets 503."
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    log_ticket_text: bool = Field(False, description="Logs the text of tickets: personal data; for debugging only.")
    log_redact: bool = Field(
        True,
        description="Resident, card and phone numbers and e-mail addresses are replaced in texts that are logged.",
    )
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="`auto`: for people on a terminal, else JSON."
    )

    trace_followed_per_s: float = Field(
        10.0,
        ge=0,
        le=10_000,
        description="Most tickets a second that are traced because their message says so; chance decides about the "
        "rest (docs/telemetry.md).",
    )

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.max_in_flight_bytes < self.max_ticket_bytes:
            raise ValueError("ROUTER_MAX_IN_FLIGHT_BYTES is below ROUTER_MAX_TICKET_BYTES: a ticket might never fit")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments win over the environment, and the environment over `.env`. Raises ConfigError on unknown names."""
        dotenv = _DotEnvSource(settings_cls, env_file=cast(DotEnvSettingsSource, dotenv_settings).env_file)
        _refuse_unknown("the environment", cast(EnvSettingsSource, env_settings).env_vars)
        _refuse_unknown(str(dotenv.env_file), dotenv.env_vars)
        return init_settings, env_settings, dotenv


def load_settings() -> Settings:
    """From the environment and `.env`. Raises ConfigError, which names every variable at fault and no value."""
    try:
        return Settings()
    except UnicodeDecodeError as error:  # the environment is text already
        raise ConfigError(f"{ENV_FILE}: no UTF-8 text, in byte {error.start}") from None
    except OSError as error:
        raise ConfigError(f"{ENV_FILE}: cannot be read: {error.strerror}") from error
    except SettingsError as error:
        raise ConfigError(f"{_blamed(str(error))}: not valid JSON") from None
    except ValidationError as error:
        problems = (
            f"{_variable(str(problem['loc'][0]))}: {problem['msg']}" if problem["loc"] else problem["msg"]
            for problem in error.errors(include_input=False, include_url=False, include_context=False)
        )
        raise ConfigError("; ".join(text.replace("Value error, ", "") for text in problems)) from None


def describe() -> str:
    """The page docs/settings.md: one row for each variable."""
    rows = (
        f"| `{_variable(name)}` | {_values(field)} | {_default(field)} | {field.description} |\n"
        for name, field in Settings.model_fields.items()
    )
    return f"{_PAGE_HEAD}| variable | values | default | meaning |\n| --- | --- | --- | --- |\n{''.join(rows)}"


_PAGE_HEAD = """# Settings

Environment variables, or lines of a file `.env` in the working directory; the environment wins. An empty value counts
as unset. A variable that begins with `ROUTER_` and is not in this table stops the worker, so that a misspelt name
cannot go unnoticed (on Kubernetes, a Service called `router` sets such variables: `enableServiceLinks: false`). Units
are in the names.

What decides about tickets (categories, thresholds, topics) is in the rule set. Traces and metrics are set up by
OpenTelemetry's own variables, such as `OTEL_EXPORTER_OTLP_ENDPOINT`.

"""


def _variable(field_name: str) -> str:
    return PREFIX + field_name.upper()


def _refuse_unknown(where: str, names: Iterable[str]) -> None:
    known = [_variable(name) for name in Settings.model_fields]
    unknown = sorted({name.upper() for name in names if name.upper().startswith(PREFIX)} - set(known))
    if unknown:
        nearest = {name: get_close_matches(name, known, n=1) for name in unknown}
        said = (f"{name} (did you mean {close[0]}?)" if close else name for name, close in nearest.items())
        raise ConfigError(f"unknown in {where}: {', '.join(said)}; docs/settings.md lists every variable")


def _blamed(message: str) -> str:
    """pydantic-settings names the field in double quotes: `error parsing value for field "x" from source "y"`."""
    return _variable(message.split('"')[1]) if message.count('"') >= 2 else "a setting"


def _values(field: FieldInfo) -> str:
    kind: Any = field.annotation
    if type(None) in get_args(kind):
        kind = get_args(kind)[0]
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    bounds = {
        name: getattr(rule, name) for rule in field.metadata for name in ("ge", "gt", "le") if hasattr(rule, name)
    }
    if bounds:
        low = f"{bounds['ge']:,}" if "ge" in bounds else f"above {bounds['gt']:,}"
        return f"{'whole number' if kind is int else 'number'}, {low} to {bounds['le']:,}"
    names: dict[Any, str] = {bool: "`true`, `false`", SecretStr: "secret", Path: "path", str: "text"}
    if kind in names:
        return names[kind]
    return "JSON" if get_origin(kind) is dict else ", ".join(f"`{value}`" for value in get_args(kind))


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, float) else "" if default is None else f"`{default}`"
