"""Mixtures of experts, each feed-forward by itself: names do not matter, each choice counts once, idle experts rest.

They hold for every feed-forward; of one without experts each says what any function of single tokens must do, or
nothing.
"""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from heddle.laws.subject import Broken, equal, feedforwards, identical, normal, refuses, subject
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.numerics.random import Key, keyed
from heddle.parts.context.layout import Layout
from heddle.parts.context.position_table import PositionTable
from heddle.parts.feedforwards import Feedforward, Mixture
from heddle.parts.modules.router_statistics import Entry, ledger

ROWS, LENGTH = 2, 9
TIGHT = 1e-12
NAN = float("nan")

Case = tuple[Feedforward, Tensor]  # a feed-forward, and what it may read: [ROWS, LENGTH, width]
Mixed = tuple[Feedforward, Mixture, Tensor]


def _each(model: Decoder) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(8)
    width = model.embed.weight.shape[1]
    for part in feedforwards(model):
        own = width if model.encoder is None or part not in set(model.encoder.modules()) else model.encoder.config.width
        yield part, normal((ROWS, LENGTH, own), generator).to(model.embed.weight.dtype)


def _mixtures(config: ModelConfig) -> Iterator[Mixed]:
    for part, x in _each(subject(config)):
        if part.mixture is not None:
            yield part, part.mixture, x


def _called(part: Feedforward, x: Tensor, layout: Layout | None = None) -> Tensor:
    with torch.no_grad():
        y: Tensor = part(x, Layout.causal(*x.shape[:2]) if layout is None else layout)
    return y


def _entered(part: Feedforward, x: Tensor, layout: Layout | None = None) -> Entry:
    with ledger() as kept:
        _called(part, x, layout)
    if len(kept.entries) != 1:
        raise Broken(f"a mixture entered its call {len(kept.entries)} times into the ledger, instead of once")
    return kept.entries[0]


def _chosen(part: Feedforward, x: Tensor) -> Tensor:
    """The experts that each token of one row takes when it is alone, bool [T, experts]."""
    return torch.stack([_entered(part, x[:, token : token + 1]).loads > 0 for token in range(x.shape[1])])


def renamed_experts(config: ModelConfig) -> None:
    """Experts in another order, their router's rows with them, give the same answer."""
    for part, mixture, x in _mixtures(config):
        before = _called(part, x)
        generator, groups = torch.Generator().manual_seed(7), mixture.groups
        inside = torch.rand(groups, mixture.experts // groups, generator=generator, device="cpu").argsort(1)
        starts = torch.randperm(groups, generator=generator, device="cpu")[:, None] * inside.shape[1]
        order = (starts + inside).flatten().to(x.device)
        with torch.no_grad():
            for parameter in (*mixture.router.parameters(), *mixture.weights):
                parameter.copy_(parameter[order].clone())
        equal(_called(part, x), before, "experts in another order")


def shuffled_tokens(config: ModelConfig) -> None:
    """A feed-forward answers each token by itself: tokens in another order have the same answers."""
    for part, x in _each(subject(config)):
        order = torch.randperm(ROWS * LENGTH, generator=torch.Generator().manual_seed(5), device="cpu").to(x.device)
        shuffled = x.flatten(0, 1)[order].view(x.shape)
        want = _called(part, x).flatten(0, 1)[order].view(x.shape)
        equal(_called(part, shuffled), want, "tokens in another order", TIGHT * max(1.0, float(want.abs().max())))


def chosen_experts(config: ModelConfig) -> None:
    """A token takes as many experts as declared, depends on their weights and no other's, and counts once for each."""
    for part, mixture, x in _mixtures(config):
        row = x[:1]
        chosen = _chosen(part, row)
        if not bool((chosen.sum(1) == mixture.top_k).all()):
            raise Broken(f"tokens take {chosen.sum(1).tolist()} experts instead of top_k = {mixture.top_k}")
        if not torch.equal(_entered(part, row).loads, chosen.sum(0)):
            raise Broken("the loads of a row are not those of its tokens, one by one")
        y = part(row, Layout.causal(1, LENGTH))
        last = mixture.weights[-1]  # of the last projection: no activation can hide it
        for token in range(LENGTH):
            (slope,) = torch.autograd.grad(y[0, token].sum(), last, retain_graph=True)
            met = slope.flatten(1).abs().amax(1) > 0
            if bool((met & ~chosen[token]).any()) or (not bool(met.any()) and bool(chosen[token].any())):
                raise Broken(f"token {token} depends on experts {met.nonzero().flatten().tolist()}, "
                             f"but took {chosen[token].nonzero().flatten().tolist()}")  # fmt: skip


def idle_experts(config: ModelConfig) -> None:
    """An expert that no token took has gradient zero, and NaN in its weights changes no bit of anything."""
    for part, mixture, x in _mixtures(config):
        one = x[:1, :1].clone().requires_grad_()
        idle = _entered(part, one.detach()).loads == 0
        learned = [one, *(parameter for parameter in part.parameters() if parameter.requires_grad)]

        def both(
            learned: list[Tensor] = learned, part: Feedforward = part, mixture: Mixture = mixture
        ) -> tuple[Tensor, tuple[Tensor, ...]]:
            y = part(learned[0], Layout.causal(1, 1))
            found = torch.autograd.grad(y.sin().sum(), learned, allow_unused=True)
            if any(slope is None for slope, value in zip(found, learned, strict=True) if _within(value, mixture)):
                raise Broken("an expert without tokens has no gradient, instead of zero")
            return y.detach(), tuple(
                torch.zeros_like(v) if s is None else s for s, v in zip(found, learned, strict=True)
            )

        want = both()
        with torch.no_grad():
            for weight in mixture.weights:
                weight[idle] = NAN
        got = both()
        identical(got[0], want[0], "NaN in the weights of idle experts")
        for value, slope, before in zip(learned, got[1], want[1], strict=True):
            if not torch.equal(slope, before):
                raise Broken("NaN in the weights of idle experts changes a gradient")
            if _within(value, mixture) and bool(slope[idle].any()):
                raise Broken("an expert that no token took has a gradient that is not zero")


def _within(value: Tensor, mixture: Mixture) -> bool:
    return any(value is weight for weight in mixture.weights)


def equal_scores(config: ModelConfig) -> None:
    """Where scores are equal, experts of the lowest indices are taken, whatever the token."""
    for part, mixture, x in _mixtures(config):
        with torch.no_grad():
            for parameter in mixture.router.parameters():
                parameter.zero_()
        for tokens in (x, torch.zeros_like(x)):
            loads = _entered(part, tokens).loads.tolist()
            want = [ROWS * LENGTH] * mixture.top_k + [0] * (mixture.experts - mixture.top_k)
            if loads != want:
                raise Broken(f"equal scores load the experts with {loads} instead of {want}")


def entries(config: ModelConfig) -> None:
    """What a call enters to balance experts is the sum over its documents alone; padding is in none of it."""
    for part, _, x in _mixtures(config):
        part.train()
        packed, filled = Layout.packed([[4, 3, 2], [1, 8]]), Layout.padded([5, LENGTH], side="left")
        parts = {
            "packed documents": (packed, [(0, 0, 4), (0, 4, 7), (0, 7, 9), (1, 0, 1), (1, 1, 9)]),
            "padded rows": (filled, [(0, 4, 9), (1, 0, 9)]),
        }
        for name, (layout, documents) in parts.items():
            whole = _entered(part, x, layout)
            alone = [_entered(part, x[row : row + 1, start:stop]) for row, start, stop in documents]
            for field in ("loads", "entropy", "tokens", "penalty"):
                values = [getattr(entry, field) for entry in alone]
                told = getattr(whole, field)
                if told is None and all(value is None for value in values):
                    continue
                if float((told - sum(values)).abs().max()) > TIGHT * max(1.0, float(told.abs().max())):
                    raise Broken(f"{name}: the {field} entered is {told.tolist()}, of the documents alone {values}")


def balancing(config: ModelConfig) -> None:
    """After a step experts above the mean load are less likely, those below more; what balances is in no answer."""
    for part, x in _each(subject(config)):
        mixture = part.mixture
        loads = torch.arange(1 if mixture is None else mixture.experts) * 2
        before = {name: value.detach().clone() for name, value in part.named_parameters()}
        y = _called(part, x)
        part.balance(loads)
        toward = torch.sign(loads.double().mean() - loads)
        for name, value in part.named_parameters():
            moved = value.detach() - before[name]
            if value.requires_grad and bool(moved.any()):
                raise Broken(f"balancing moves {name}, which gradients teach")
            if not value.requires_grad:
                if bool((moved.sign() * toward < 0).any()):
                    raise Broken(f"{name}: an expert above the mean load became more likely")
                with torch.no_grad():
                    value.copy_(before[name] + 0.5)
        equal(_called(part, x), y, "what balances was raised alike for all experts")


def router_precision(config: ModelConfig) -> None:
    """Experts are chosen by at least float32 numbers, also in bfloat16 and under autocast."""
    for _, mixture, x in _mixtures(config):
        rounded = copy.deepcopy(mixture.router).to(torch.bfloat16)
        rounded.requires_grad_(False)
        tokens = x.to(torch.bfloat16)
        want = copy.deepcopy(rounded).double()(tokens.double())
        found = {"in bfloat16": rounded(tokens)}
        if torch.amp.is_autocast_available(x.device.type):
            with torch.autocast(x.device.type, torch.bfloat16):
                found["under autocast"] = copy.deepcopy(rounded).float()(tokens.float())
        for name, got in found.items():
            error = float((got.double() - want).abs().max())
            if got.dtype not in (torch.float32, torch.float64) or not error < 1e-5 * max(1.0, float(want.abs().max())):
                raise Broken(f"{name}, the router's numbers are {got.dtype} and differ by {error:.1e}")


def in_training(config: ModelConfig) -> None:
    """In training, too, a feed-forward's answer to a token knows no padding behind it, later token or other row."""
    for part, x in _each(subject(config)):
        part.train()
        held, others = x.clone(), x.flip(1) + 1.0

        def answer(tokens: Tensor, layout: Layout | None = None, part: Feedforward = part) -> Tensor:
            with keyed(Key(3, 4, torch.arange(len(tokens)))):
                return _called(part, tokens, layout)

        want = answer(x)
        held[:, 4:] = others[:, 4:]
        bound = TIGHT * max(1.0, float(want.abs().max()))
        equal(answer(held)[:, :4], want[:, :4], "in training, tokens from 4 on were changed", bound)
        held = torch.cat((x[:1], others[1:]))
        equal(answer(held)[:1], want[:1], "in training, row 1 was changed", bound)
        longer = torch.cat((x, others[:, :3]), dim=1)
        padded = answer(longer, Layout.padded([LENGTH] * ROWS, LENGTH + 3, side="right"))[:, :LENGTH]
        equal(padded, want, "in training, padding was added", bound)
        _refused_with_a_state(part, x)


def _refused_with_a_state(part: Feedforward, x: Tensor) -> None:
    _, layout = PositionTable.empty(ROWS, None, LENGTH, x.device).extend(Layout.causal(ROWS, LENGTH))
    call: Callable[[], Tensor] = lambda: _called(part, x, layout)  # noqa: E731
    if part.mixture is not None and part.mixture.capacity is not None:
        refuses(call, "capacity", "experts of a limited capacity were trained with a state")
    elif not bool(call().isfinite().all()):
        raise Broken("in training with a state, the answer is not finite")
