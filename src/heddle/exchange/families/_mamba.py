"""What the families with Mamba-2 layers share: the fields of the mixer, under each family's names, and its tensors."""

from typing import Any, NamedTuple

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.family import DEPTHWISE_CONV, TensorTransform, WeightMap
from heddle.exchange.safetensors_folder import INFINITY
from heddle.model.config import ModelConfig
from heddle.parts.mixers.mamba2 import Mamba2Config

AUTO = "auto"
UNLIMITED = 1e30  # a time step no smaller counts as infinite
# Of the first weights, or of kernels.
UNUSED_FIELDS = """time_step_min time_step_max time_step_floor time_step_rank chunk_size use_mamba_kernels
rescale_prenorm_residual""".split()  # noqa: SIM905


class Names(NamedTuple):
    """A family's names of the mixer's fields, each with its default there (None: it must be given)."""

    heads: tuple[str, int | None]
    head_dim: tuple[str, int | None]
    state_size: tuple[str, int]
    groups: tuple[str, int]
    conv_kernel: tuple[str, int]
    conv_bias: tuple[str, bool]
    bias: tuple[str, bool]
    expand: tuple[str, int]


# Those of Granite 4 and Falcon-H1.
PREFIXED_NAMES = Names(
    heads=("mamba_n_heads", 128),
    head_dim=("mamba_d_head", 64),
    state_size=("mamba_d_state", 256),
    groups=("mamba_n_groups", 1),
    conv_kernel=("mamba_d_conv", 4),
    conv_bias=("mamba_conv_bias", True),
    bias=("mamba_proj_bias", False),
    expand=("mamba_expand", 2),
)


def read_mixer(config: ConfigReader, names: Names, eps: float) -> dict[str, Any]:
    """The mixer, with time steps as `time_step_limit` has them.

    Raises ConfigError if its heads are not `expand` times as wide as the model.
    """
    fields = read_fields(config, names, eps)
    if config.get(*names.expand) * config.require_count("hidden_size") != fields["heads"] * fields["head_dim"]:
        heads = f"{fields['heads']} heads of {fields['head_dim']}"
        raise config.invalid(names.expand[0], f"times hidden_size is not {heads}; make them equal")
    return fields | read_time_step_limit(config)


def read_time_step_limit(config: ConfigReader) -> dict[str, Any]:
    """The mixer's limits of time steps as `time_step_limit` has them."""
    limit = config.optional("time_step_limit") or [0.0, UNLIMITED]
    least, maximum = (UNLIMITED if step == INFINITY else float(step) for step in limit)
    return time_step_limit(least, maximum)


def read_fields(config: ConfigReader, names: Names, eps: float) -> dict[str, Any]:
    """The mixer but for its time steps."""
    fields: dict[str, Any] = {"kind": "mamba2"}
    for field, (name, default) in zip(Names._fields[:-1], names[:-1], strict=True):
        fields[field] = _read_field(config, name, default)
    for name in UNUSED_FIELDS:
        config.optional(name)
    return fields | {"norm": {"kind": "rms", "eps": eps}}


def _read_field(config: ConfigReader, name: str, default: int | None) -> int:
    """A field that must be given if `default` is None; some files say AUTO for the default."""
    if default is None:
        return config.require_count(name)
    if config.data.get(name) == AUTO:
        config.unread.discard(name)
        return default
    return config.get(name, default)


def time_step_limit(least: float, maximum: float = UNLIMITED) -> dict[str, Any]:
    """The mixer's limits of time steps, none if they limit nothing."""
    free = least <= 0.0 and maximum >= UNLIMITED
    return {} if free else {"time_step_limit": [least, min(maximum, UNLIMITED)]}


def write_mixer(design: ModelConfig, names: Names) -> dict[str, Any]:
    """The fields that `read_mixer` reads."""
    mixer = first_mixer(design)
    expand = {names.expand[0]: max(1, mixer.heads * (mixer.head_dim or 1) // design.width)}
    return write_fields(design, names) | expand | write_time_step_limit(mixer)


def write_time_step_limit(mixer: Mamba2Config) -> dict[str, Any]:
    """The field that `read_time_step_limit` reads."""
    least, maximum = mixer.time_step_limit or (0.0, UNLIMITED)
    return {"time_step_limit": [least, INFINITY if maximum >= UNLIMITED else maximum]}


def write_fields(design: ModelConfig, names: Names) -> dict[str, Any]:
    """The fields of the first Mamba-2 mixer but for its time steps."""
    mixer = first_mixer(design)
    return {name: getattr(mixer, field) for field, (name, _) in zip(Names._fields[:-1], names[:-1], strict=True)}


def first_mixer(design: ModelConfig) -> Mamba2Config:
    """The first Mamba-2 mixer, also of a pair, or a default one."""
    default = Mamba2Config(heads=1, head_dim=design.width)
    return next((mixer for mixer in design_parts.mixers(design) if isinstance(mixer, Mamba2Config)), default)


# The weights of a norm of several groups, stored one after the other.
NORM_BY_GROUP = TensorTransform(
    lambda parameters: parameters[0].flatten(), lambda tensor, shapes: [tensor.view(shapes[0])]
)


def map_mixer(weights: WeightMap, hf: str, heddle: str) -> None:
    """The tensors of a mixer; its input projections are one, and k, q and v are the paper's B, C and x."""
    weights.add_module(f"{hf}.in_proj", *(f"{heddle}.{role}" for role in ("gate", "v", "k", "q", "a")))
    weights.add_tensor(f"{hf}.conv1d.weight", f"{heddle}.convolution.weight", transform=DEPTHWISE_CONV)
    weights.add_tensor(f"{hf}.conv1d.bias", f"{heddle}.convolution.bias")
    for name, role in (("A_log", "decay.rate"), ("dt_bias", "decay.bias"), ("D", "skip")):
        weights.add_tensor(f"{hf}.{name}", f"{heddle}.{role}")
    weights.add_tensor(f"{hf}.norm.weight", f"{heddle}.norm.weight", transform=NORM_BY_GROUP)
    weights.add_module(f"{hf}.out_proj", f"{heddle}.out")
