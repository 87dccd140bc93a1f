"""RoPE (Su et al. 2021): rotate pair i of a head at position m by the angle `m · base^(-2i/rotary_dim)`.

Layouts of the pairs: `half` = dims (i, i + rotary_dim/2) (NeoX, Hugging Face's Llama), `interleaved` = dims
(2i, 2i + 1) (RoFormer, GPT-J, DeepSeek). With `rotary_dim` below head_dim only the first dims are rotated (partial
rotary).
"""

from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from heddle.config import DesignError, FiniteFloat, PositiveFloat, Width, build_under, refuse
from heddle.numerics.rotary import angle_dtype, apply_rotary, pos_freqs, rotary_table
from heddle.numerics.transfer import Constants, to_device
from heddle.parts.layout import Layout
from heddle.parts.modules.eager import layout_dependent
from heddle.parts.positions import DEFAULT_BASE, Rotation, RotationConfig, check_base
from heddle.parts.scalings import ScaledFrequencies, ScalingConfig

InvFreq = tuple[float, ...]

MAX_CACHED = 256  # sets of frequencies that a module stores, by sequence length


class RopeConfig(RotationConfig):
    """Fields of `rope`. `inv_freq`, one per pair, replaces the inverse frequencies of `base`."""

    aliases = ("rotary",)

    base: PositiveFloat = DEFAULT_BASE
    layout: Literal["half", "interleaved"] = "half"
    rotary_dim: Width | None = None  # default: head_dim
    inv_freq: tuple[FiniteFloat, ...] | None = None
    scaling: ScalingConfig | None = None  # changes the frequencies of `base` for longer sequences
    cast: Literal["after"] | None = None  # half-precision heads are rotated in float32, then cast (OLMo-2)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scaling is not None and self.inv_freq is not None:
            refuse(
                "inv_freq", "is given together with scaling, which needs the frequencies of base; keep one of the two"
            )
        check_base(self.base, self.inv_freq)
        if self.scaling is not None and self.base <= 1.0:
            refuse("base", f"{self.base} makes no pair slower than the first, so there is nothing to scale; raise it")
        return self

    def resolved(self, head_dim: int) -> Self:
        """The number of rotary dims written out."""
        return self.replace(rotary_dim=self.rotary_dim or head_dim)

    def build(self, head_dim: int) -> "Rope":
        """Build the module. Raises DesignError for a wrong `rotary_dim` or number of frequencies."""
        dim = self.rotary_dim or head_dim
        if dim % 2 or dim > head_dim:
            raise DesignError(
                "rotary_dim", f"{dim} dims of {head_dim} cannot be rotated in pairs; give an even number that fits"
            )
        if self.inv_freq is not None and len(self.inv_freq) != dim // 2:
            raise DesignError("inv_freq", f"{len(self.inv_freq)} given; rotary_dim = {dim} needs {dim // 2}")
        return Rope(self, dim)


class Rope(Rotation):
    """The module. It holds no tensor, so no change of dtype can harm its angles.

    A length-dependent scaling gets the length of each document, or with a state the final length of each sequence
    (`Layout.text_lengths`). So every token of a document is rotated with the same frequencies, whatever else is in the
    batch.
    """

    invertible = True

    def __init__(self, config: RopeConfig, dim: int) -> None:
        super().__init__()
        self.layout, self.cast = config.layout, config.cast
        self.length_dependent = config.scaling is not None and config.scaling.length_dependent
        self.config, self.dim = config, dim
        self._frequencies: dict[tuple[int, torch.dtype], ScaledFrequencies] = {}
        self._constants = Constants()
        _, self.attention_factor, self.score_scale = self.scaled_frequencies(1)
        self.scaled_frequencies(1, torch.float32)  # here, because a traced graph could not compute them

    def scaled_frequencies(self, length: int, dtype: torch.dtype = torch.float64) -> ScaledFrequencies:
        """The inverse frequencies for a sequence of `length` tokens, computed in `dtype` and stored."""
        frequencies = self._frequencies.get((length, dtype))
        if frequencies is None:
            frequencies = _scaled_frequencies(self.config, self.dim, length, dtype)
            if len(self._frequencies) >= MAX_CACHED:
                self._frequencies.clear()
            self._frequencies[length, dtype] = frequencies
        return frequencies

    def prepare_length(self, length: int) -> None:
        """The inverse frequencies, in each dtype of angles."""
        for dtype in (torch.float32, torch.float64):
            self.scaled_frequencies(length, dtype)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, H, T, head_dim] -> the same shape; the table of angles is built once for all layers."""
        cosine, sine = self._table(layout, self._wide(x))
        return apply_rotary(x, cosine, sine, self.layout).to(x.dtype)

    def inverse(self, x: Tensor, layout: Layout) -> Tensor:
        """As `forward`, by the opposite angles."""
        cosine, sine = self._table(layout, self._wide(x))
        return apply_rotary(x, cosine, -sine, self.layout).to(x.dtype)

    def _wide(self, x: Tensor) -> torch.dtype:
        return torch.promote_types(x.dtype, torch.float32) if self.cast == "after" else x.dtype

    @layout_dependent
    def _table(self, layout: Layout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        wide = self.table_dtype(dtype, layout.positions.device)
        inv_freq, by_text = self._inv_freq(layout, angle_dtype(wide))
        key = ("rope", inv_freq, by_text, self.attention_factor, dtype, self.float64_angles)
        return layout.cached(key, lambda: self._make_table(layout, inv_freq, by_text, dtype))

    def _inv_freq(self, layout: Layout, dtype: torch.dtype) -> tuple[InvFreq, tuple[tuple[InvFreq, ...], ...] | None]:
        """The inverse frequencies of all documents of a call; or, if they differ, of each row's documents, in order."""
        lengths = (layout.text_lengths if self.length_dependent else ()) or ((1,),)
        by_length = {n: self.scaled_frequencies(n, dtype).inv_freq for row in lengths for n in row or (1,)}
        first = next(iter(by_length.values()))
        if all(inv_freq == first for inv_freq in by_length.values()):
            return first, None
        return first, tuple(tuple(by_length[n] for n in row or (1,)) for row in lengths)

    def _make_table(
        self, layout: Layout, inv_freq: InvFreq, by_text: tuple[tuple[InvFreq, ...], ...] | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        device = layout.positions.device
        wide = self.table_dtype(dtype, device)
        if by_text is None:
            frequencies = self._constants.tensor(inv_freq, angle_dtype(wide), device)
        else:
            frequencies = _by_token(by_text, layout)
        cosine, sine = rotary_table(layout.positions, frequencies, wide, self.attention_factor)
        return cosine.to(dtype), sine.to(dtype)


def _by_token(texts_of_rows: tuple[tuple[InvFreq, ...], ...], layout: Layout) -> Tensor:
    """The inverse frequencies of each row's documents -> of each token [B, T, pairs], or of each row [B, 1, pairs]."""
    texts = max(map(len, texts_of_rows))
    filled = [[*row, *[row[0]] * (texts - len(row))] for row in texts_of_rows]  # no token reads the fill
    table = to_device(torch.tensor(filled, dtype=torch.float64, device="cpu"), layout.positions.device)
    if texts == 1:
        return table
    assert layout.call_segment_ids is not None
    return table.gather(1, layout.call_segment_ids[..., None].expand(-1, -1, table.shape[2]))


def _scaled_frequencies(config: RopeConfig, dim: int, length: int, dtype: torch.dtype) -> ScaledFrequencies:
    """The inverse frequencies of `dim` rotary dims for a sequence of `length` tokens, computed in `dtype`."""
    if config.inv_freq is not None:
        return ScaledFrequencies(config.inv_freq)
    if config.scaling is None:
        return ScaledFrequencies(tuple((1.0 / pos_freqs(dim, config.base, dtype)).tolist()))
    return build_under("scaling", config.scaling.scale_frequencies, dim, config.base, length, dtype)
