"""The calibration artefact: what `calibrate` writes, the worker obeys, and a hand edit breaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError

from worker.core.calibration import Calibrator, CorrectnessCalibrator
from worker.core.categories import CategoryId
from worker.core.certificates import Certificate, MarginGate, ScoreForm
from worker.core.digest import fingerprint
from worker.errors import ArtefactError

T = TypeVar("T")


def _read(kind: type[T], from_dict: Callable[[Mapping[str, Any]], T]) -> PlainValidator:
    """For a field that holds one of our own frozen types and stands in the file as its own dictionary."""
    return PlainValidator(lambda value: value if isinstance(value, kind) else from_dict(value))


_Calibrator = Annotated[Calibrator, _read(Calibrator, Calibrator.from_dict), PlainSerializer(Calibrator.to_dict)]
_Correctness = Annotated[
    CorrectnessCalibrator,
    _read(CorrectnessCalibrator, CorrectnessCalibrator.from_dict),
    PlainSerializer(CorrectnessCalibrator.to_dict),
]
_Certificate = Annotated[Certificate, _read(Certificate, Certificate.from_dict), PlainSerializer(Certificate.to_dict)]
_MarginGate = Annotated[MarginGate, _read(MarginGate, MarginGate.from_dict), PlainSerializer(MarginGate.to_dict)]


class Fingerprints(BaseModel):
    """What the calibration was fitted on. Scores made with anything else are not what it describes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    tokenizer: str
    prompt: str
    labels: str
    categories: str
    normaliser: str

    def differences(self, now: Fingerprints) -> tuple[str, ...]:
        """Names of the parts that differ, in the order above."""
        return tuple(name for name in type(self).model_fields if getattr(self, name) != getattr(now, name))


class Artefact(BaseModel):
    """calibration.json. `digest` covers everything else in the file."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        populate_by_name=True,
        serialize_by_alias=True,
        ignored_types=(cached_property,),
    )

    schema_: Literal["ticket-router/calibration/1"] = Field("ticket-router/calibration/1", alias="schema")
    rule_set: str
    created_at: str
    engine: str
    model_name: str
    labels: tuple[CategoryId, ...] = Field(description="category ids in label order")
    fingerprints: Fingerprints
    form: ScoreForm = Field(description="which label is routed, and what is compared with the threshold")
    min_label_mass: float = Field(description="tickets under it were left out: they never route")
    calibrator: _Calibrator
    correctness: _Correctness | None = Field(None, description="maximum probability to P(the routed answer is right)")
    certificates: tuple[_Certificate, ...]
    margin_gate: _MarginGate | None = None
    data: dict[str, Any] = Field(description="what it was fitted and certified on: counts, digests, split")
    metrics: dict[str, Any] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    digest: str = ""

    def sealed(self) -> Artefact:
        """With its digest filled in."""
        return self.model_copy(update={"digest": self._digest()})

    def _digest(self) -> str:
        body = self.model_dump(mode="json", exclude={"digest"})
        return fingerprint(orjson.dumps(body, option=orjson.OPT_SORT_KEYS))

    def to_bytes(self) -> bytes:
        """Indented JSON for people to read; `from_bytes` gives back the same."""
        return orjson.dumps(self.model_dump(mode="json"), option=orjson.OPT_INDENT_2) + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Artefact:
        """Raises ArtefactError where it is unreadable, of another schema, or was edited since it was written."""
        again = "run `ticket-router calibrate` again"
        try:
            artefact = cls.model_validate(orjson.loads(data))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"]) or "the file"
            raise ArtefactError(f"{where}: {place}: {first['msg']}; {again}") from error
        except ValueError as error:
            raise ArtefactError(f"{where}: not JSON; {again}") from error
        except ArtefactError as error:
            raise ArtefactError(f"{where}: {error}") from error
        if artefact.digest != artefact._digest():
            raise ArtefactError(f"{where}: the digest does not match: it was edited after it was written; {again}")
        if artefact.calibrator.categories != len(artefact.labels):
            raise ArtefactError(f"{where}: the calibrator and the labels differ in number; {again}")
        return artefact

    @cached_property
    def by_category(self) -> Mapping[str, Certificate]:
        """The certificate under which tickets predicted as a category may route."""
        return {member: certificate for certificate in self.certificates for member in certificate.members}
