"""Untie the head's weight from the embedding's, or tie them where they are equal."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from heddle.config import DesignError
from heddle.conversion.rewrite import EVERYTHING, Rewrite
from heddle.conversion.weights import CalibrationText, ConvertedWeights, Weights

HEAD, EMBEDDING = "head.weight", "embed.weight"


class Tied(Rewrite):
    """`tied`: whether the head shares the embedding's weight. True is refused where the two differ."""

    keeps: ClassVar[frozenset[str]] = EVERYTHING
    exact: ClassVar[bool] = True
    targets: ClassVar[Mapping[str, str]] = {"head.tied": "tied"}
    tied: bool

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError if nothing would change, or if the weights to tie differ."""
        self.refuse_layers("head.tied")
        head = source.design.head
        if head.tied == self.tied:
            state = "tied" if self.tied else "untied"
            raise DesignError("head.tied", f"the head is {state} already, so nothing would change; leave it out")
        if self.tied and not torch.equal(source.tensor(HEAD), source.tensor(EMBEDDING)):
            reason = "the head's weight differs from the embedding's, so they cannot share one"
            raise DesignError("head.tied", f"{reason}; keep them untied")
        return _Tied(source, source.design.replace(head=head.replace(tied=self.tied)))


class _Tied(ConvertedWeights):
    def convert_other(self, name: str) -> Tensor:
        """An untied head starts as a copy of the embedding."""
        return self.source.tensor(EMBEDDING if name == HEAD else name)
