"""What a token may depend on: no later token, and exactly the declared window."""

import torch
from torch import Tensor

from heddle.laws.subject import Broken, answer, call, normal, placed, subject, text, undisturbed, windows
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.parts.context.layout import Layout
from heddle.parts.mixers import Mixer


def later_tokens(config: ModelConfig) -> None:
    """Later tokens change no earlier bit (in a bidirectional design they do change something)."""
    model = subject(config)
    length, vocabulary = 13, model.embed.weight.shape[0]
    tokens, others = text(config, 2, length), text(config, 2, length, seed=1)
    layouts = {"one document": None, "packed documents": Layout.packed([[5, 8], [12, 1]])}
    for name, layout in layouts.items():
        before = answer(model, tokens, layout)
        for start in (1, 6, length - 1):
            changed = torch.cat((tokens[:, :start], others[:, start:]), dim=1)
            changed[:, start] = tokens[:, start] % (vocabulary - 1) + 1  # surely another one
            after = answer(model, changed, layout)
            if model.causal:
                undisturbed(model, after[:, :start], before[:, :start], f"{name}, tokens from {start} on were changed")
            elif layout is None and torch.equal(after[:, start - 1], before[:, start - 1]):
                raise Broken(f"a bidirectional design: token {start - 1} does not see token {start}")


def other_documents(config: ModelConfig) -> None:
    """The tokens of one packed document change no bit of another."""
    model = subject(config)
    tokens, others = text(config, 1, 12), text(config, 1, 12, seed=1)
    layout = Layout.packed([[4, 5, 3]])
    before = answer(model, tokens, layout)
    for first, last in ((0, 4), (4, 9), (9, 12)):
        changed = tokens.clone()
        changed[:, first:last] = others[:, first:last]
        after = answer(model, changed, layout)
        outside = torch.ones(12, dtype=torch.bool)
        outside[first:last] = False
        undisturbed(model, after[:, outside], before[:, outside], f"tokens {first} to {last - 1} were changed")


def receptive_field(config: ModelConfig) -> None:
    """A token depends on exactly the tokens that its mixers declare: by gradient, each layer and the stack."""
    model = subject(config)
    length = max([2 * w + 3 for w in windows(model)] + [9])
    layout = placed(model, 1, length)
    generator = torch.Generator().manual_seed(2)
    for index, mixer in enumerate(model.mixers()):
        if mixer is not None:
            x = normal((1, length, config.width), generator)
            x.requires_grad_()
            y, _ = mixer(x, layout)
            _check_support(x, y, _span([mixer]), f"layer {index}")
    found: list[Tensor] = []

    def catch(_module: object, _inputs: object, output: Tensor) -> Tensor:
        found.append(output.detach().requires_grad_())
        return found[0]

    handle = model.embed.register_forward_hook(catch)
    hidden = call(model, text(config, 1, length), layout)
    handle.remove()
    _check_support(found[0], hidden, _span(_real_mixers(model)), "the whole model")


def _real_mixers(model: Decoder) -> list[Mixer]:
    return [mixer for mixer in model.mixers() if mixer is not None]


def _span(mixers: list[Mixer]) -> tuple[float, float]:
    """How many tokens back and ahead a token sees through these mixers, one after the other."""
    back = ahead = 0.0
    for mixer in mixers:
        reach = float("inf") if mixer.reach is None else mixer.reach
        back += reach - 1 if mixer.causal else reach
        ahead += 0 if mixer.causal else reach
    return back, ahead


def _check_support(x: Tensor, y: Tensor, span: tuple[float, float], what: str) -> None:
    length = x.shape[1]
    probe = torch.linspace(-1.0, 1.5, y.shape[-1], dtype=y.dtype)
    for query in sorted({0, length // 2, length - 1}):
        (gradient,) = torch.autograd.grad((y[0, query] * probe).sum(), x, retain_graph=True)
        seen = gradient[0].abs().amax(-1) > 0
        distance = query - torch.arange(length)
        declared = (distance <= span[0]) & (-distance <= span[1])
        if not torch.equal(seen, declared):
            key = int((seen != declared).nonzero()[0])
            verb = "depends on" if seen[key] else "does not depend on"
            raise Broken(f"{what}: token {query} {verb} token {key}, against what its mixers declare")
