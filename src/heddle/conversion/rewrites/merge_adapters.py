"""Merge a folder of LoRA adapters into the weights that they were trained on: `W + (alpha / rank) B A`.

A run that trained adapters needs no rewrite: its checkpoints hold the merged weights.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from heddle.conversion.rewrite import EVERYTHING, Rewrite
from heddle.conversion.weights import LAYER_PREFIX, CalibrationText, ConvertedWeights, Weights
from heddle.model.decoder import build
from heddle.model.lora import merged_weight
from heddle.storage.model import LoraFolder, digest_tensors, read_lora, with_lora_folder


class MergeAdapters(Rewrite):
    """Merge the LoRA adapters in `folder`, as `save_lora` writes it."""

    keeps: ClassVar[frozenset[str]] = EVERYTHING
    exact: ClassVar[bool] = True  # the result computes what the model computes with its adapters
    targets: ClassVar[Mapping[str, str]] = {"adapters": "folder"}
    folder: str

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Reads all weights once. Raises CheckpointError for damaged adapters, or if they belong to other weights."""
        self.refuse_layers("adapters")
        saved = read_lora(Path(self.folder))
        saved.check_base(digest_tensors(_base_tensors(source)))
        with_lora_folder(build(source.design, device="meta"), saved)
        return _Merged(source, saved)


class _Merged(ConvertedWeights):
    def __init__(self, source: Weights, saved: LoraFolder) -> None:
        super().__init__(source, source.design)
        self.saved = saved
        self.adapted = frozenset(f"{path}.weight" for path in saved.paths)

    def convert_layer(self, index: int) -> dict[str, Tensor]:
        """The layer with the adapters added."""
        prefix = f"{LAYER_PREFIX}{index}."
        return {name: self._merged(prefix + name, value) for name, value in self.source.layer(index).items()}

    def convert_other(self, name: str) -> Tensor:
        """Projections of the encoder may have adapters too."""
        return self._merged(name, self.source.tensor(name))

    def _merged(self, name: str, value: Tensor) -> Tensor:
        if name not in self.adapted:
            return value
        path, saved = name.removesuffix(".weight"), self.saved
        return merged_weight(value, saved.tensors[f"{path}.a"], saved.tensors[f"{path}.b"], saved.alpha / saved.rank)


def _base_tensors(source: Weights) -> Iterator[tuple[str, Tensor]]:
    """All weights in alphabetical order, with the encoder's tied head, as an adapter folder's hash has them."""
    tied = {"encoder.head.weight": "encoder.embed.weight"} if source.design.encoder is not None else {}
    for name in sorted({*source.names, *tied}):
        yield name, source.tensor(tied.get(name, name))
