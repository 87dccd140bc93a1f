"""The costs of a design, measured on a model without weights: `heddle.show`."""

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from heddle.errors import ConfigError
from heddle.notebook import html_table
from heddle.session import dtype_of, load_parts, parse_kernels
from heddle.settings import (
    Argument,
    Deterministic,
    Device,
    Json,
    Kernel,
    Option,
    PartFile,
    VerbSettings,
    parse_length,
)
from heddle.tokenization import DEFAULT_VOCAB_SIZE
from heddle.training.settings import Overrides

if TYPE_CHECKING:
    from heddle.model.config import ModelConfig
    from heddle.model.decoder import Decoder

CONTEXT_LENGTHS = [2048, 8192, 32768, 131072]
MAX_COUNT = 10**9
PROFILED_LENGTH = 512  # tokens of a profiled sequence, if no context length was given


@dataclass(frozen=True, kw_only=True)
class ShowSettings(VerbSettings):
    """Settings of `heddle show` and `heddle.show`."""

    design: Annotated[Any, Argument("DESIGN", "A YAML, TOML or JSON file, preset:NAME, or a checkpoint folder.")] = None
    overrides: Overrides = ()
    context_length: Annotated[
        tuple[int, ...], Option("N", "Tokens in the context; repeatable. [2048 8192 …]", parse_length)
    ] = ()
    batch_size: Annotated[int, Option("N", "Sequences in the batch.")] = 1
    encoder_length: Annotated[
        int | None, Option("N", "Tokens that cross-attention reads. [the context length]", parse_length)
    ] = None
    schema: Annotated[bool, Option("", "Print the JSON Schema of designs, for editors.")] = False
    profile: Annotated[bool, Option("", "Measure where the time of a step goes on this CPU.")] = False
    device: Device = "auto"
    precision: Annotated[str | None, Option("NAME", "fp32 or bf16. [as a folder's weights, else fp32]")] = None
    deterministic: Deterministic = False
    kernel: Kernel = ()
    part: PartFile = ()
    json: Json = False


@dataclass(frozen=True)
class ShownDesign:
    """The costs of a design. facts: what `heddle show --json` prints, as plain values."""

    facts: dict[str, Any]

    def _repr_html_(self) -> str:
        rows = [
            (context["context_length"], context["flops_per_token"], context["state_bytes"])
            for context in self.facts["contexts"]
        ]
        caption = f"{self.facts['parameters']:,} parameters, {self.facts['active_parameters']:,} of them active"
        return html_table(("context, tokens", "FLOPs per token", "state, bytes"), rows, caption)


def show(
    design: "ShowSettings | ModelConfig | str | Path | Mapping[str, Any]", overrides: Sequence[str] = (), **options: Any
) -> ShownDesign:
    """Return what `heddle show` prints about a design, and print nothing.

    design: a config, plain data, a file, preset:NAME or a folder; or one `ShowSettings`. options: as on the command
    line, such as `context_length=[2048]`. Raises ConfigError for a design that cannot be built.
    """
    if not isinstance(design, ShowSettings):
        design = ShowSettings.read({"design": plain_design(design), "overrides": list(overrides), **options})
    return ShownDesign(_facts(design))


def _facts(settings: ShowSettings) -> dict[str, Any]:
    """Everything that `show` prints, as plain data."""
    source, encoder_length = settings.design, settings.encoder_length
    load_parts(settings.part)
    if source is None:
        raise ConfigError("DESIGN: is missing; give a file, preset:NAME or a checkpoint folder")
    counts = [*settings.context_length, settings.batch_size, 1 if encoder_length is None else encoder_length]
    if min(counts) < 1 or max(counts) > MAX_COUNT:
        reason = "at least 1" if min(counts) < 1 else "at most 10^9"
        raise ConfigError(f"show: --context-length, --batch-size and --encoder-length must be {reason}")
    from heddle.model.load_config import load_config, read_design, with_vocab_size

    # A design that is too large is rejected before torch is imported.
    data = read_design(source, settings.overrides)
    from heddle.exchange.family_match import family_lines
    from heddle.model.config import refuse_overflow
    from heddle.numerics.dispatch import choose_deterministic
    from heddle.numerics.kernels import kernels
    from heddle.runtime import device_name

    equal_bits = choose_deterministic() if settings.deterministic else nullcontext()
    with kernels(**parse_kernels(settings.kernel)), refuse_overflow(), equal_bits:
        loaded = load_config(data)
        config = with_vocab_size(loaded, DEFAULT_VOCAB_SIZE)
        imported, stored = _of_folder(source)
        dtype = dtype_of(settings.precision or "fp32") if settings.precision or stored is None else stored
        device = device_name(settings.device)  # kernels are chosen as on it, even if this machine lacks it
        lengths, batch = list(settings.context_length), settings.batch_size
        facts = measure(config, lengths, batch, dtype, device, encoder_length, imported)
        if encoder_length is not None and not any(context["encoder_length"] for context in facts["contexts"]):
            raise ConfigError(f"--encoder-length {encoder_length}: no layer reads an encoder's output; leave it out")
        facts["vocab_size_assumed"] = loaded.vocab_size is None
        facts["exports_as"] = family_lines(config, imported)
        if settings.profile:
            facts["profile"] = _profile(config, settings)
    return facts


def _of_folder(source: Any) -> tuple[str | None, Any]:
    """The family that the model in a folder was imported from, and the dtype of its weights, both if known."""
    if not isinstance(source, str) or not Path(source).is_dir():
        return None, None
    from heddle.exchange.imported_checkpoint import imported_family
    from heddle.storage.model import stored_dtype

    return imported_family(source), stored_dtype(Path(source))


def plain_design(design: Any) -> Any:
    """A design as plain data, or its path."""
    from heddle.model.config import ModelConfig

    return design.dump() if isinstance(design, ModelConfig) else design


def _profile(config: "ModelConfig", settings: ShowSettings) -> list[dict[str, Any]]:
    """Profile a training step and a token on this CPU; returns the tables as plain data."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences lines that torch's profiler writes to stderr
    from heddle.lab.profile import PROFILED_TOKENS, profile_design
    from heddle.machine import measured_choices
    from heddle.runtime import set_up_runtime

    set_up_runtime("cpu", choices=measured_choices())
    usual = config.usual_length(PROFILED_LENGTH, PROFILED_TOKENS)
    length, precision = (settings.context_length or (usual,))[0], settings.precision or "fp32"
    profiles = profile_design(config, settings.batch_size, length, precision)
    return [
        profile._asdict() | {"operations": [operation._asdict() for operation in profile.operations]}
        for profile in profiles
    ]


def measure(
    config: "ModelConfig",
    context_lengths: list[int],
    batch_size: int,
    dtype: Any,
    device: str,
    encoder_length: int | None = None,
    imported: str | None = None,
) -> dict[str, Any]:
    """Everything that `show` prints, as plain data. encoder_length None: as many tokens as each context.

    context_lengths: if empty, the usual ones, as far as the model has positions. imported: the family of an imported
    model.
    """
    from heddle.lab.engines import engine_states
    from heddle.model.size import build_distinct_layers, decode_flops, measure_size

    model = build_distinct_layers(config, dtype)
    if not context_lengths:
        context_lengths = sorted({config.usual_length(length) for length in CONTEXT_LENGTHS})
    sizes = [measure_size(model, length, batch_size, encoder_length) for length in context_lengths]
    first = sizes[0]
    kernels = kernels_by_phase(model, context_lengths[0], device, encoder_length)
    return {
        "design": config.dump(),
        "parameters": first.parameters,
        "active_parameters": first.active_parameters,
        "embedding_parameters": first.embedding_parameters,
        "around_layers": _around_layers(config),
        "weight_bytes": first.parameters * dtype.itemsize,
        "encoder": [vars(layer) for layer in first.encoder],
        "layers": [vars(layer) for layer in first.layers],
        "multi_token": [vars(layer) for layer in first.multi_token],
        "batch_size": batch_size,
        "dtype": str(dtype).removeprefix("torch."),
        "contexts": [
            {
                "context_length": context.context_length,
                "encoder_length": context.encoder_length,
                "flops_per_token": context.flops_per_token,
                "decode_flops": decode_flops(model, context.context_length, context.encoder_length)
                if model.causal
                else None,
                "multi_token_flops_per_token": context.multi_token_flops_per_token,
                "state_bytes": context.state_bytes,
                "state_bytes_per_token": context.state_bytes_per_token,
                "position_table_bytes": context.position_table_bytes,
            }
            for context in sizes
        ],
        "engines": [
            vars(engine) | {"state_bytes": list(engine.state_bytes)} for engine in engine_states(model, sizes, imported)
        ],
        "device": device,
        "kernels": kernels,
    }


def _around_layers(config: "ModelConfig") -> dict[str, str]:
    """The parts beside the layers as phrases of what is not at its default."""
    from heddle.model.config import describe

    parts = {
        "residual": config.residual,
        "norm": config.norm,
        "embedding": config.embedding,
        "head": config.head.replace(tied=True),
    }
    phrases = {name: describe(part, with_defaults=False) for name, part in parts.items()}
    return {name: phrase for name, phrase in phrases.items() if phrase}


def kernels_by_phase(
    model: "Decoder", context_length: int, device: str, encoder_length: int | None = None
) -> dict[str, list[dict[str, Any]]]:
    """The kernels of a meta model on a device, as plain data: in training, and in decoding if it has a state."""
    from heddle.model.size import measure_kernel_choices

    phases = {"training": (context_length, -1), "decode": (1, model.config.usual_length(context_length, 1))}
    kernels = {}
    for phase, (queries, cached_tokens) in phases.items():
        if cached_tokens >= 0 and not model.causal:
            continue
        counts = measure_kernel_choices(model, queries, cached_tokens, device, encoder_length)
        kernels[phase] = [
            {
                "operation": choice.operation,
                "kernel": choice.kernel,
                "calls": calls,
                "rejected": [list(pair) for pair in choice.rejected],
            }
            for choice, calls in counts.items()
        ]
    return kernels
