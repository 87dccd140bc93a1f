"""Softmax attention to latent attention: exact at full rank, else with a smaller state (after Meng et al. 2025).

The rotated keys of all heads become `rope_dim` shared dims; the rest of the keys, and the values, become one latent of
`kv_rank` dims. Both are chosen on a text so that the layers' outputs change least. See
`heddle.conversion.latent_factors`.
"""

from collections.abc import Mapping
from typing import Self

from pydantic import model_validator
from torch import Tensor

from heddle.config import DesignError, PositiveInt, Width, refuse
from heddle.conversion.head_parameters import head_sizes, state_elements
from heddle.conversion.latent_factors import attention_factors, head_dims, supported_attention
from heddle.conversion.latent_layer import (
    LatentPlan,
    check_sizes,
    full_rank_factors,
    latent_parameters,
    low_rank_factors,
    measure_layer,
    measure_losses,
    plain_position,
    plan_by_budget,
    plan_uniform,
    rope_dim_choices,
)
from heddle.conversion.rewrite import Rewrite, replace_layers
from heddle.conversion.sensitivity import StateBudget
from heddle.conversion.weights import CalibrationText, ConvertedWeights, Weights, activations_of
from heddle.model.config import ModelConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.latent_attention import LatentAttentionConfig
from heddle.parts.positions.rope import RopeConfig
from heddle.progress import print_status

MIN_TOKENS_PER_INPUT = 4  # tokens to calibrate on, for each dim of the width

Mixers = Mapping[int, AttentionConfig]  # by the number of the layer


class LatentAttentionReplacement(Rewrite):
    """Replace `attention` by `latent_attention`. Without sizes: exact, at full rank, which saves almost no state.

    kv_rank, rope_dim: sizes of each layer. state_budget: the share of the state per token to keep, distributed over the
    layers and over both sizes by their losses. fold: how many neighboring frequencies become one. exportable: a latent
    norm, plain frequencies and equal layers, as in DeepSeek-V3.
    """

    kv_rank: Width | None = None
    rope_dim: Width | None = None
    state_budget: StateBudget | None = None
    fold: PositiveInt = 1
    exportable: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kv_rank is not None and self.state_budget is not None:
            refuse("kv_rank", "conflicts with state_budget; give one of the two")
        if self.rope_dim is not None and self.is_full_rank:
            refuse("rope_dim", "needs a size of the latent; give kv_rank or state_budget, too")
        if self.rope_dim is not None and self.rope_dim % 2:
            refuse("rope_dim", f"{self.rope_dim} is odd, but dims are rotated in pairs; give an even number")
        if self.is_full_rank and (self.fold > 1 or self.exportable):
            field = "exportable" if self.exportable else "fold"
            refuse(field, "applies to a smaller state only; give kv_rank and rope_dim, or state_budget")
        if self.exportable and self.fold > 1:
            refuse("fold", "follows from rope_dim if exportable is true; leave it out")
        return self

    @property
    def is_full_rank(self) -> bool:
        """Whether keys and values are kept exactly."""
        return self.kv_rank is None and self.state_budget is None

    @property
    def needs_text(self) -> bool:
        """True unless the conversion is at full rank."""
        return not self.is_full_rank

    @property
    def sizes_on_text(self) -> bool:
        """True if a budget decides them."""
        return self.state_budget is not None

    def is_exact(self, design: ModelConfig) -> bool:
        """Only at full rank."""
        return self.is_full_rank

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError for a feature that latent attention lacks, or a size that does not fit."""
        mixers = self._mixers(source.design)
        if self.is_full_rank:
            configs = {index: _full_rank_config(mixer, source) for index, mixer in mixers.items()}
            return _Converted(source, _with_mixers(source.design, configs), {})
        assert text is not None
        _check_text(text, source.design.width)
        if self.kv_rank is not None and text.device.type == "meta":  # no tokens, but the sizes are known
            pairs = (self.rope_dim or 0) // 2
            plans = dict.fromkeys(mixers, LatentPlan(self.kv_rank, (), (pairs,), (1.0,) * pairs))
        else:
            plans = self._plans(source, text, mixers)
        configs = {index: self._config(mixer, plans[index]) for index, mixer in mixers.items()}
        return _Converted(source, _with_mixers(source.design, configs), plans, text)

    def _mixers(self, design: ModelConfig) -> Mixers:
        """The mixers to convert. Raises DesignError for one that cannot be, or if there is none."""
        indices = self.selected_layers(design)
        if self.layers is None:
            mixers_by_index = {index: design.layers[index].mixer for index in indices}
            indices = tuple(index for index, each in mixers_by_index.items() if isinstance(each, AttentionConfig))
            whole = tuple(index for index in indices if getattr(mixers_by_index[index], "window", None) is None)
            if whole and len(whole) < len(indices):  # a window's state is bounded already
                print_status(
                    f"latent_attention: layers with a window are unchanged: {sorted(set(indices) - set(whole))}"
                )
                indices = whole
        if not indices:
            raise DesignError("layers", "have no softmax attention to convert; name other layers")
        mixers = {}
        for index in indices:
            path = f"layers.{index}.mixer"
            mixer = mixers[index] = supported_attention(design.layers[index].mixer, path)
            if mixer.qk_norm is not None and self.is_full_rank:
                reason = (
                    "has query-key norms, which no latent holds exactly; give kv_rank and rope_dim, or state_budget"
                )
                raise DesignError(path, reason)
            if self.exportable and mixer.bias:
                reason = "has query biases, which no family with latent attention has; leave out exportable"
                raise DesignError(path, reason)
            check_sizes(mixer, design.width, (self.kv_rank, self.rope_dim), self.exportable, path)
        return mixers

    def _plans(self, source: Weights, text: CalibrationText, mixers: Mixers) -> dict[int, LatentPlan]:
        """Measure the layers one by one, and choose the sizes of each."""
        curves = []
        for activations in activations_of(source, text, mixers, "measuring"):
            mixer = mixers[activations.index]
            factors, statistics = measure_layer(mixer, activations, source.layer(activations.index))
            curves.append(measure_losses(factors, statistics, self._rope_dims(mixer), self.fold, self.exportable))
        if self.kv_rank is not None:
            plans = [layer[0].plan(self.kv_rank + 2 * sum(layer[0].counts)) for layer in curves]
        else:
            assert self.state_budget is not None
            plan = plan_uniform if self.exportable else plan_by_budget
            plans = plan(curves, [state_elements(mixer) for mixer in mixers.values()], self.state_budget)
        return dict(zip(mixers, plans, strict=True))

    def _rope_dims(self, mixer: AttentionConfig) -> list[int]:
        if self.kv_rank is not None or self.rope_dim is not None:
            return [self.rope_dim or 0]
        assert self.state_budget is not None
        return rope_dim_choices(mixer, self.state_budget, self.exportable)

    def _config(self, mixer: AttentionConfig, plan: LatentPlan) -> LatentAttentionConfig:
        _, head_dim, value_dim = head_sizes(mixer)
        config = LatentAttentionConfig(
            heads=mixer.heads,
            kv_rank=plan.kv_rank,
            nope_dim=head_dim,
            rope_dim=plan.rope_dim or None,
            value_dim=value_dim,
            kv_norm="rms" if self.exportable else "none",
            scale=None if self.exportable else mixer.scale,
            bias=True,
            query_bias=bool(mixer.bias) or None,
        )
        if not plan.rope_dim:
            return config
        if self.exportable:
            return config.replace(position=plain_position(mixer, plan.rope_dim))
        return config.replace(position=_rope(mixer, plan.inv_freq))


class _Converted(ConvertedWeights):
    """plans: of the layers that are compressed."""

    def __init__(
        self, source: Weights, design: ModelConfig, plans: Mapping[int, LatentPlan], text: CalibrationText | None = None
    ) -> None:
        super().__init__(source, design, text)
        self.plans = plans

    def convert_layer(self, index: int) -> dict[str, Tensor]:
        """Replace the parameters of attention by latent attention's."""
        layer = self.source.layer(index)
        before, config = self.source.design.layers[index].mixer, self.design.layers[index].mixer
        if not (isinstance(before, AttentionConfig) and isinstance(config, LatentAttentionConfig)):
            return layer
        if index in self.plans:
            factors, statistics = measure_layer(before, self.activations(index), layer)
            plan = self.plans[index]
            rank = plan.kv_rank - (config.kv_norm == "rms")
            latent = low_rank_factors(factors, statistics, plan.folded_pairs, plan.counts, rank)
        else:
            factors = attention_factors(before, layer)
            latent = full_rank_factors(factors)
        device = layer["mixer.out.weight"].device
        mixer = {name: value.to(device) for name, value in latent_parameters(factors, latent, config).items()}
        return {name: value for name, value in layer.items() if not name.startswith("mixer.")} | mixer


def _full_rank_config(mixer: AttentionConfig, source: Weights) -> LatentAttentionConfig:
    """See `full_rank_factors`."""
    _, frequencies, _ = head_dims(mixer, source.dtype)
    kv_heads, head_dim, value_dim = head_sizes(mixer)
    nope_dim = head_dim - 2 * len(frequencies)
    inv_freq = tuple(frequencies.repeat(kv_heads).tolist())
    return LatentAttentionConfig(
        heads=mixer.heads,
        kv_rank=min(source.design.width, kv_heads * (nope_dim + value_dim)),
        nope_dim=max(1, nope_dim),
        rope_dim=2 * len(inv_freq) or None,
        value_dim=value_dim,
        kv_norm="none",
        scale=mixer.scale,
        bias=bool(mixer.bias),
        query_bias=bool(mixer.bias) or None,
        position=_rope(mixer, inv_freq) if inv_freq else None,
    )


def _rope(mixer: AttentionConfig, inv_freq: tuple[float, ...]) -> RopeConfig:
    assert isinstance(mixer.position, RopeConfig)
    return RopeConfig(layout=mixer.position.layout, inv_freq=inv_freq, cast=mixer.position.cast)


def _with_mixers(design: ModelConfig, configs: Mapping[int, LatentAttentionConfig]) -> ModelConfig:
    layers = {index: design.layers[index].replace(mixer=config) for index, config in configs.items()}
    return replace_layers(design, layers).resolved()


def _check_text(text: CalibrationText, width: int) -> None:
    needed = MIN_TOKENS_PER_INPUT * width
    if text.tokens < needed:
        reason = f"of {text.tokens} tokens is too short to calibrate a width of {width}"
        raise DesignError("text", f"{reason}; give --calibration-tokens {needed} or more")
