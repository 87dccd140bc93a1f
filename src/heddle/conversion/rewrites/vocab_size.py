"""More or fewer token ids. The ids that stay keep their logits.

New ids get embeddings of zero, and are masked: a bias of the head makes their logits so low that their probability is
zero. Without the mask their logits are the logits of a zero vector, and take probability from the others.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from heddle.config import DesignError, PositiveInt
from heddle.conversion.rewrite import Rewrite
from heddle.conversion.weights import CalibrationText, ConvertedWeights, Weights
from heddle.model.config import ModelConfig

MASKED_LOGIT = -30000.0  # exp of it is zero in every dtype, and float16 still holds it
BY_ID = ("embed.weight", "embed.per_layer.weight", "head.weight", "head.bias")  # their first dim is the id
TABLE = "value_embedding.weight"  # within a layer, the same


class VocabSize(Rewrite):
    """`vocab_size`: the number of ids; ids are added, or removed, at the end. `mask`: whether new ids are masked.

    The mask gives the design a `head.bias`, which few families can export.
    """

    keeps: ClassVar[frozenset[str]] = frozenset({"attention", "layers", "convolutions"})
    targets: ClassVar[Mapping[str, str]] = {"vocab_size": "vocab_size"}
    vocab_size: PositiveInt
    mask: bool = True

    def is_exact(self, design: ModelConfig) -> bool:
        """For the logits of the ids that stay; new ids that are not masked change their probabilities."""
        assert design.vocab_size is not None
        return self.mask or self.vocab_size < design.vocab_size

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError if the size does not change, or if a softcap of the logits forbids the mask."""
        self.refuse_layers("vocab_size")
        design = source.design
        assert design.vocab_size is not None
        if self.vocab_size == design.vocab_size:
            reason = f"the design has {self.vocab_size} already; give another number"
            raise DesignError("vocab_size", reason)
        masks = self.mask and self.vocab_size > design.vocab_size
        if masks and design.head.softcap is not None:
            reason = "bounds every logit, so new ids cannot be masked; give mask=false, and let a sampler exclude them"
            raise DesignError("head.softcap", reason)
        encoder = design.encoder
        if encoder is not None and encoder.vocab_size is None:
            encoder = encoder.replace(vocab_size=design.vocab_size)  # the encoder's ids stay
        head = design.head.replace(bias=design.head.bias or masks)
        return _Vocabulary(source, design.replace(vocab_size=self.vocab_size, head=head, encoder=encoder), masks)


class _Vocabulary(ConvertedWeights):
    def __init__(self, source: Weights, design: ModelConfig, masks: bool) -> None:
        super().__init__(source, design)
        self.masks = masks

    def convert_layer(self, index: int) -> dict[str, Tensor]:
        """Cut off or append rows of value embeddings."""
        rows = self.design.vocab_size
        assert rows is not None
        layer = self.source.layer(index)
        tables = {name: value for name, value in layer.items() if name.endswith(TABLE)}
        return layer | {name: functional.pad(x, (0, 0, 0, rows - len(x))) for name, x in tables.items()}

    def convert_other(self, name: str) -> Tensor:
        """Cut off or append rows of ids."""
        if name not in BY_ID:
            return self.source.tensor(name)
        shape = self.specs[name][1]
        if name in self.source.specs:
            value = self.source.tensor(name)
        else:  # the head gains a bias
            value = torch.zeros(self.source.specs["embed.weight"][1][0])
        if len(value) >= shape[0]:
            return value[: shape[0]]
        result = value.new_zeros(shape)
        result[: len(value)] = value
        if name == "head.bias" and self.masks:
            result[len(value) :] = MASKED_LOGIT / max(1.0, self.design.head.scale)
        return result
