"""Merge a folder of LoRA adapters into the weights that they were trained on: `W + (alpha / rank) B A`.

A run that trained adapters needs no rewrite: its checkpoints hold the merged weights.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from heddle.conversion.rewrite import EVERYTHING, Rewrite
from heddle.conversion.weights import CalibrationText, ConvertedWeights, Weights
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

    def convert_parameter(self, name: str, value: Tensor) -> Tensor:
        """The parameter with its adapter added, if it has one; projections of the encoder may have adapters too."""
        if name not in self.adapted:
            return value
        path, saved = name.removesuffix(".weight"), self.saved
        return merged_weight(value, saved.tensors[f"{path}.a"], saved.tensors[f"{path}.b"], saved.alpha / saved.rank)


def _base_tensors(source: Weights) -> Iterator[tuple[str, Tensor]]:
    """All weights in alphabetical order, with the encoder's tied head, as an adapter folder's hash has them."""
    tied = {"encoder.head.weight": "encoder.embed.weight"} if source.design.encoder is not None else {}
    for name in sorted({*source.names, *tied}):
        yield name, source.tensor(tied.get(name, name))
