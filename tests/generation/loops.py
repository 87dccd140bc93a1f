"""Plain loops that generation is held against: everything computed anew for each token, no state anywhere."""

import torch
from torch import Tensor

from heddle.laws.shrink import shrink
from heddle.laws.subject import answer
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.load_config import load_config
from heddle.model.presets import KINDS
from tests.cases import CASES, case


def greedy(model: Decoder, prompt: list[int], steps: int) -> list[int]:
    """The plain loop: everything is computed anew for each token."""
    row = list(prompt)
    model.eval()
    with torch.no_grad():
        for _ in range(steps):
            logits = model.head(answer(model, torch.tensor([row])))[0, -1]
            row.append(int((logits == logits.max()).nonzero()[0]))
    return row[len(prompt) :]


def lively(model: Decoder) -> Decoder:
    """Layers that outweigh the embedding, so that greedy text varies instead of repeating one token."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and name.startswith("layers."):
                parameter.mul_(30.0)
    return model


def designs() -> dict[str, ModelConfig]:
    """A small design of every kind of preset, and the first case of every mixer that no preset has."""
    found = {kind: shrink(load_config(f"preset:{kind}-tiny")) for kind in KINDS}
    known = {mixer for config in found.values() for mixer in _mixers(config)}
    for name in CASES:
        new = _mixers(case(name)) - known
        if new and writes(case(name)):
            found[name] = case(name)
            known |= new
    return found


def writes(config: ModelConfig) -> bool:
    """Whether a design continues texts: it hides later tokens."""
    return build(config, device="meta").causal


def _mixers(config: ModelConfig) -> set[str]:
    return {layer.mixer.kind for _, layer in config.expand() if layer.mixer is not None}


def log_p(model: Decoder, row: list[int]) -> Tensor:
    """log p of each next token after a row, float64 [vocab]."""
    with torch.no_grad():
        return model.head(answer(model, torch.tensor([row])))[0, -1].double().log_softmax(-1)


def likeliest(model: Decoder, prompt: list[int], steps: int, end: int | None) -> tuple[list[int], float]:
    """Of all texts of at most `steps` tokens the one with the highest log p a token, by trying every one."""
    best: tuple[list[int], float] = ([], float("-inf"))

    def follow(text: list[int], total: float) -> None:
        nonlocal best
        for token, more in enumerate(log_p(model, [*prompt, *text]).tolist()):
            longer = [*text, token]
            if token != end and len(longer) < steps:
                follow(longer, total + more)
            elif (total + more) / len(longer) > best[1]:
                best = longer, (total + more) / len(longer)

    follow([], 0.0)
    return best


def beam_search(model: Decoder, prompt: list[int], steps: int, beams: int, end: int | None) -> list[int]:
    """Beam search as one would write it down: lists of (text, total), sorted."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    done: list[tuple[list[int], float]] = []
    for _ in range(steps):
        longer: list[tuple[list[int], float]] = []
        for text, total in live:
            for token, more in enumerate(log_p(model, [*prompt, *text]).tolist()):
                (done if token == end else longer).append(([*text, token], total + more))
        live = sorted(longer, key=lambda one: -one[1])[:beams]
    return max(done + live, key=lambda one: one[1] / len(one[0]))[0]
