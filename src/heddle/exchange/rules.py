"""Reversible rules between tensors: one of theirs is some of ours, joined in a known way and taken apart again.

Every rule is a bijection that moves numbers and computes none, so a tensor keeps its bits both ways. One of theirs is
always made of whole tensors of ours, or of whole slices along their first dimension (an expert's).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Ours = str | tuple[str, int]  # the name of a parameter of ours, or of the slice [index] of one


class Form(NamedTuple):
    """How tensors of ours make one of theirs: join, and split, which is told the shapes of ours."""

    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor, Sequence[torch.Size]], Sequence[Tensor]]


def _cat(ours: Sequence[Tensor]) -> Tensor:
    return ours[0] if len(ours) == 1 else torch.cat(list(ours))


def _cut(theirs: Tensor, shapes: Sequence[torch.Size]) -> Sequence[Tensor]:
    return [theirs] if len(shapes) == 1 else theirs.split([shape[0] for shape in shapes])


def _turned(x: Tensor) -> Tensor:
    return x.T if x.dim() == 2 else x


BLOCKS = Form(_cat, _cut)  # one after the other along the outputs; a single one as it is
TRANSPOSED = Form(  # the same with a matrix [inputs, outputs], as GPT-2's Conv1D keeps it
    lambda ours: _turned(_cat(ours)), lambda theirs, shapes: _cut(_turned(theirs), shapes)
)
CHANNELS = Form(  # a depthwise convolution [channels, 1, kernel]
    lambda ours: ours[0].unsqueeze(1), lambda theirs, shapes: [theirs.squeeze(1)]
)


def in_groups(groups: int) -> Form:
    """Outputs go group by group: what each of ours has for the first group, then for the second, …"""

    def join(ours: Sequence[Tensor]) -> Tensor:
        return torch.cat([one.unflatten(0, (groups, -1)) for one in ours], dim=1).flatten(0, 1)

    def split(theirs: Tensor, shapes: Sequence[torch.Size]) -> Sequence[Tensor]:
        sizes = [shape[0] // groups for shape in shapes]
        return [part.flatten(0, 1) for part in theirs.unflatten(0, (groups, -1)).split(sizes, dim=1)]

    return Form(join, split)


@dataclass(frozen=True)
class Rule:
    """Their tensor `theirs`, made of `ours` by a form."""

    theirs: str
    ours: tuple[Ours, ...]
    form: Form


class Rules:
    """The rules of one model, gathered by a family's `rules` from the shapes of our parameters."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.shapes = shapes
        self.found: dict[str, Rule] = {}

    def tensor(self, theirs: str, *ours: Ours, form: Form = BLOCKS) -> None:
        """Their tensor of this name; nothing where we have no such parameter."""
        if (ours[0] if isinstance(ours[0], str) else ours[0][0]) in self.shapes:
            self.found[theirs] = Rule(theirs, ours, form)

    def module(self, theirs: str, *ours: Ours, form: Form = BLOCKS) -> None:
        """The weight of their module, and its bias where ours have one."""
        for suffix in (".weight", ".bias"):
            names = [one + suffix if isinstance(one, str) else (one[0] + suffix, one[1]) for one in ours]
            self.tensor(theirs + suffix, *names, form=form)

    def pieces(self, rule: Rule) -> list[torch.Size]:
        """The shapes of a rule's parts of ours."""
        return [self.shapes[one] if isinstance(one, str) else self.shapes[one[0]][1:] for one in rule.ours]

    def shape(self, rule: Rule) -> torch.Size:
        """The shape that their tensor must have."""
        return rule.form.join([torch.empty(shape, device="meta") for shape in self.pieces(rule)]).shape

    def uncovered(self) -> list[str]:
        """Our parameters of which no rule speaks, or not of every slice."""
        told: dict[str, int] = dict.fromkeys(self.shapes, 0)
        for rule in self.found.values():
            for one in rule.ours:
                name = one if isinstance(one, str) else one[0]
                told[name] += self.shapes[name].numel() if isinstance(one, str) else self.shapes[name][1:].numel()
        return [name for name, shape in self.shapes.items() if told[name] != shape.numel()]
