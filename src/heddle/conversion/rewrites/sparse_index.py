"""Dense attention becomes sparse: each layer gets an indexer, which selects the keys that a query attends to.

The indexer is fitted on the text to the dense attention's weights, with everything else frozen: the dense warm-up of
DeepSeek-V3.2 (2025). Afterwards it learns from its loss over the selected keys, in healing as in any training. Without
`heads` and `head_dim` it has no parameters, and nothing is fitted (MoBA, Lu et al. 2025). The conversion is exact for
texts so short that all keys are selected.
"""

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator
from torch import Tensor

from heddle.config import DesignError, PositiveInt, Width
from heddle.conversion.fit import Chunk, FitError
from heddle.conversion.mixer_replacement import FittedMixers, softmax_obstacle
from heddle.conversion.weights import CalibrationText, Weights
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.numerics.attention.indexer import BlockScore
from heddle.parts.mixers import Mixer, MixerConfig
from heddle.parts.mixers.attention import Attention, AttentionConfig
from heddle.parts.mixers.latent_attention import LatentAttention, LatentAttentionConfig
from heddle.parts.modules.indexer import IndexerConfig
from heddle.parts.modules.router_statistics import record_router_statistics


def _divergence(mixer: Mixer, chunk: Chunk) -> Tensor:
    """KL(dense attention ‖ indexer) over all visible keys, summed over queries."""
    assert isinstance(mixer, Attention | LatentAttention)
    assert mixer.indexer is not None
    mixer.indexer.loss_keys = "all"  # of the warm-up; the module in use is built from the design
    mixer.train()
    with record_router_statistics() as recorded:
        mixer(chunk.inputs.to(next(mixer.parameters()).dtype), chunk.layout)
    mixer.eval()
    return recorded.index_losses[0].aux_loss


def _tokens(chunk: Chunk) -> float:
    return float((chunk.layout.positions >= 0).sum())


class SparseIndex(FittedMixers):
    """Give `attention` and `latent_attention` an `indexer` of these fields, fitted to the weights of dense attention.

    longest_text: tokens of the longest text to be read; if all of its keys are selected, the conversion is exact.
    """

    keeps: ClassVar[frozenset[str]] = frozenset({"attention", "convolutions"})
    lowered: ClassVar[FitError] = FitError("nats from dense attention", _divergence, _tokens)
    convertible: ClassVar[str] = "softmax attention that has neither a window nor an indexer"
    top_k: Width
    heads: Width | None = None
    head_dim: Width | None = None
    block: Width = 1
    block_score: BlockScore = "highest"
    local: Annotated[int, Field(ge=0, le=2**20)] = 0
    per_head: bool = False
    longest_text: PositiveInt | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._indexer()
        return self

    def _indexer(self) -> IndexerConfig:
        names = ("top_k", "heads", "head_dim", "block", "block_score", "local", "per_head")
        fields = {name: getattr(self, name) for name in names}
        return IndexerConfig(**fields, loss_keys="all" if self.heads is None else "selected")

    @property
    def needs_text(self) -> bool:
        """True if it fits an indexer, or chooses layers."""
        return self.heads is not None or self.keep is not None

    def is_exact(self, design: ModelConfig) -> bool:
        """True if all keys of every text are selected."""
        return self.longest_text is not None and self.longest_text <= self.top_k * self.block

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError as `FittedMixers` does, and for layers that read the selection of another layer."""
        for index, layer in enumerate(source.design.layers):
            if getattr(layer.mixer, "shared_index", False):
                reason = (
                    f"reads the selection of an earlier layer, which {self.name} may change; convert another design"
                )
                raise DesignError(f"layers.{index}.mixer.shared_index", reason)
        weights = super().apply(source, text)
        build(weights.design, device="meta")  # refuses a width that does not fit, before anything is fitted
        return weights

    def obstacle(self, mixer: MixerConfig | None) -> str | None:
        """Anything but attention over all tokens, with its own keys and values, that has no indexer."""
        if isinstance(mixer, AttentionConfig) and mixer.shared_kv:
            return "reads the keys of another layer"
        if isinstance(mixer, AttentionConfig) and mixer.value_residual is not None:
            return "adds the values of another layer"
        if getattr(mixer, "indexer", None) is not None:
            return "has an indexer already"
        return softmax_obstacle(mixer, AttentionConfig, LatentAttentionConfig)

    def converted(self, mixer: AttentionConfig | LatentAttentionConfig, path: str) -> MixerConfig:
        """The same mixer with the indexer."""
        indexer = self._indexer()
        indexer.check_attention(mixer.heads, None, getattr(mixer, "causal", True))
        return mixer.replace(indexer=indexer)

    def start(self, source: Weights, index: int, mixer: Mixer) -> dict[str, Tensor]:
        """All parameters of the mixer."""
        layer = source.layer(index)
        return {name.removeprefix("mixer."): x for name, x in layer.items() if name.startswith("mixer.")}

    def is_fitted(self, name: str) -> bool:
        """Only the indexer's parameters."""
        return name.startswith("indexer.")
