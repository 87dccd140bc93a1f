"""Dependencies: no token depends on a later one, and each depends on exactly its declared window."""

import torch
from torch import Tensor

from heddle.laws.harness import (
    LawViolation,
    assert_unaffected,
    forward,
    forward_no_grad,
    layout_for,
    model_under_test,
    normal_tensor,
    random_tokens,
    windows,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.parts.context.layout import Layout
from heddle.parts.mixers import Mixer


def causality(config: ModelConfig) -> None:
    """Changing later tokens changes no bit of earlier ones; in a bidirectional design it must change some."""
    model = model_under_test(config)
    length, vocabulary = 13, model.embed.weight.shape[0]
    tokens, others = random_tokens(config, 2, length), random_tokens(config, 2, length, seed=1)
    layouts = {"one document": None, "packed documents": Layout.packed([[5, 8], [12, 1]])}
    for name, layout in layouts.items():
        before = forward_no_grad(model, tokens, layout)
        for start in (1, 6, length - 1):
            changed = torch.cat((tokens[:, :start], others[:, start:]), dim=1)
            changed[:, start] = tokens[:, start] % (vocabulary - 1) + 1  # surely another one
            after = forward_no_grad(model, changed, layout)
            if model.causal:
                assert_unaffected(
                    model, after[:, :start], before[:, :start], f"{name}, tokens from {start} on were changed"
                )
            elif layout is None and torch.equal(after[:, start - 1], before[:, start - 1]):
                raise LawViolation(f"a bidirectional design: token {start - 1} does not see token {start}")


def document_isolation(config: ModelConfig) -> None:
    """Changing the tokens of one packed document changes no bit of another document."""
    model = model_under_test(config)
    tokens, others = random_tokens(config, 1, 12), random_tokens(config, 1, 12, seed=1)
    layout = Layout.packed([[4, 5, 3]])
    before = forward_no_grad(model, tokens, layout)
    for first, last in ((0, 4), (4, 9), (9, 12)):
        changed = tokens.clone()
        changed[:, first:last] = others[:, first:last]
        after = forward_no_grad(model, changed, layout)
        outside = torch.ones(12, dtype=torch.bool)
        outside[first:last] = False
        assert_unaffected(model, after[:, outside], before[:, outside], f"tokens {first} to {last - 1} were changed")


def receptive_field(config: ModelConfig) -> None:
    """The gradient of a token reaches exactly the tokens that its mixers declare, per layer and in the whole model."""
    model = model_under_test(config)
    length = max([2 * w + 3 for w in windows(model)] + [9])
    layout = layout_for(model, 1, length)
    generator = torch.Generator().manual_seed(2)
    for index, mixer in enumerate(model.mixers()):
        if mixer is not None:
            x = normal_tensor((1, length, config.width), generator)
            x.requires_grad_()
            y, _ = mixer(x, layout)
            _check_support(x, y, _span([mixer]), f"layer {index}")
    embedded: list[Tensor] = []

    def catch(_module: object, _inputs: object, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    handle = model.embed.register_forward_hook(catch)
    hidden = forward(model, random_tokens(config, 1, length), layout)
    handle.remove()
    _check_support(embedded[0], hidden, _span(_present_mixers(model)), "the whole model")


def _present_mixers(model: Decoder) -> list[Mixer]:
    return [mixer for mixer in model.mixers() if mixer is not None]


def _span(mixers: list[Mixer]) -> tuple[float, float]:
    """How many tokens back and ahead a token depends on through these mixers, one after the other."""
    back = ahead = 0.0
    for mixer in mixers:
        window = float("inf") if mixer.window is None else mixer.window
        back += window - 1 if mixer.causal else window
        ahead += 0 if mixer.causal else window
    return back, ahead


def _check_support(x: Tensor, y: Tensor, span: tuple[float, float], what: str) -> None:
    length = x.shape[1]
    probe = torch.linspace(-1.0, 1.5, y.shape[-1], dtype=y.dtype)
    for query in sorted({0, length // 2, length - 1}):
        (gradient,) = torch.autograd.grad((y[0, query] * probe).sum(), x, retain_graph=True)
        depends = gradient[0].abs().amax(-1) > 0
        distance = query - torch.arange(length)
        declared = (distance <= span[0]) & (-distance <= span[1])
        if not torch.equal(depends, declared):
            key = int((depends != declared).nonzero()[0])
            verb = "depends on" if depends[key] else "does not depend on"
            raise LawViolation(f"{what}: token {query} {verb} token {key}, against what its mixers declare")
