"""What is measured of the models of a conversion, as plain data that is saved after each model."""

from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from heddle.analysis.comparison.speed import Samples
from heddle.training.evaluation.scores import FiniteScores
from heddle.training.evaluation.text_recall import NeedleScores

ORIGINAL, CONVERTED, HEALED = "original", "converted", "healed"


@dataclass(frozen=True)
class LayerError:
    """The relative error ‖converted − original‖ / ‖original‖ of one layer.

    mixer: of the mixer's output, where the layer reads the original's stream. stream: of the stream after the layer,
    where each model reads its own. None where the two do not have the same shape, or one is not finite.
    """

    layer: int
    mixer: float | None
    stream: float | None


@dataclass(frozen=True)
class ModelResult:
    """One model.

    key: identifies its weights. method: what the figures draw a line for. architecture: the class of transformers.
    state_bytes: [(context, bytes)]. windows: of the held-out text. positions: for each range of positions, of each
    window. first_spans, repeated_spans: of the spans that are repeated in each row. layer_errors: empty for the
    original, and where layers do not correspond.
    """

    name: str
    stage: str
    method: str
    source: str
    key: str
    design_key: str
    summary: str
    architecture: str
    parameters: int
    flops_per_token: float
    state_bytes: list[tuple[int, int]]
    windows: FiniteScores
    positions: list[FiniteScores]
    first_spans: FiniteScores
    repeated_spans: FiniteScores
    needles: list[NeedleScores]
    layer_errors: list[LayerError]


@dataclass(frozen=True)
class MeasuredText:
    """The held-out text that every model reads.

    positions: the ranges [first, end) of a token's position in its document, within a window. note: what could not be
    measured, or "". bos_ids: the tokens that each row begins with (`heddle.data.samples.RowProtocol`).
    """

    name: str
    sha256: str
    sequence_length: int
    windows: int
    bytes: int
    positions: list[tuple[int, int]]
    row_length: int
    span_rows: int
    span_length: int
    needle_rows: int
    needle_length: int
    note: str = ""
    bos_ids: tuple[int, ...] = ()


@dataclass
class ConversionResults:
    """All that is measured of a conversion.

    speeds: by the key of a design, the samples of each round. warnings: sentences that a reader must know.
    """

    heddle: str
    created: str
    command: str
    source: str
    hardware: dict[str, Any]
    text: MeasuredText
    settings: dict[str, Any]
    models: list[ModelResult] = field(default_factory=list)
    speeds: dict[str, list[dict[str, Samples]]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def original(self) -> ModelResult:
        """The model that was converted."""
        return next(model for model in self.models if model.stage == ORIGINAL)

    @property
    def converted_models(self) -> list[ModelResult]:
        """The converted and the healed models."""
        return [model for model in self.models if model.stage != ORIGINAL]

    def to_plain(self) -> dict[str, Any]:
        """The results as plain values for JSON."""
        plain = asdict(self)
        if not self.text.bos_ids:  # as files say it that are older than the field
            del plain["text"]["bos_ids"]
        return plain


def parse_results(data: dict[str, Any]) -> ConversionResults:
    """The results that `to_plain` wrote. Raises pydantic's ValidationError for anything else."""
    return _adapter().validate_python(data)


@cache
def _adapter() -> TypeAdapter[ConversionResults]:
    return TypeAdapter(ConversionResults)
