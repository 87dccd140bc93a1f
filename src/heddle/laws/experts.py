"""Mixtures of experts: the order of experts does not matter, each choice counts once, idle experts have no effect.

The laws run on every feed-forward. Without experts they check what any function of single tokens must do, or do not
apply.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from heddle.laws.harness import (
    DoesNotApply,
    LawViolation,
    assert_bitwise_equal,
    assert_close,
    assert_refused,
    feedforwards,
    model_under_test,
    normal_tensor,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.numerics.random import RandomKey, use_random_key
from heddle.parts.feedforwards import ExpertInfo, Feedforward
from heddle.parts.layout import HandedOver, Layout
from heddle.parts.modules.router_statistics import RouterStatistics, record_router_statistics
from heddle.parts.position_table import PositionTable

ROWS, LENGTH = 2, 9
TOLERANCE = 1e-12
NAN = float("nan")

Case = tuple[Feedforward, Tensor]  # a feed-forward, and what it may read: [ROWS, LENGTH, (streams,) width]
Mixed = tuple[Feedforward, ExpertInfo, Tensor]


def _each(model: Decoder) -> Iterator[Case]:
    if not feedforwards(model):
        raise DoesNotApply("no feed-forward")
    generator = torch.Generator().manual_seed(8)
    width = model.embed.weight.shape[1]
    for part in feedforwards(model):
        own = width if model.encoder is None or part not in set(model.encoder.modules()) else model.encoder.config.width
        inner = () if part.streams is None else (part.streams,)
        yield part, normal_tensor((ROWS, LENGTH, *inner, own), generator).to(model.embed.weight.dtype)


def _mixtures(config: ModelConfig, scored: bool = False) -> Iterator[Mixed]:
    """The mixtures of experts; scored: those whose experts no hash selects. Raises DoesNotApply if there are none."""
    cases = [(part, part.expert_info, x) for part, x in _each(model_under_test(config)) if part.expert_info is not None]
    if not cases:
        raise DoesNotApply("no experts")
    if scored and not (cases := [each for each in cases if not each[1].hashed]):
        raise DoesNotApply("a hash selects the experts")
    yield from cases


def _forward(part: Feedforward, x: Tensor, layout: Layout | None = None) -> Tensor:
    with torch.no_grad():
        y: Tensor = part(x, _with_ids(x, layout))[0]
    return y


def _with_ids(x: Tensor, layout: Layout | None = None) -> Layout:
    """A layout whose ids of tokens depend on the tokens x [B, T, …] alone. None: one document in each row."""
    handed_over = HandedOver()
    handed_over.tokens = (x.flatten(2)[..., 0].detach().double() * 1e6).nan_to_num().long()
    return replace(Layout.causal(*x.shape[:2]) if layout is None else layout, handed_over=handed_over)


def _statistics(part: Feedforward, x: Tensor, layout: Layout | None = None) -> RouterStatistics:
    with record_router_statistics() as recorded:
        _forward(part, x, layout)
    if len(recorded.entries) != 1:
        raise LawViolation(
            f"a router recorded its statistics {len(recorded.entries)} times in one call, instead of once"
        )
    return recorded.entries[0]


def _experts_of_each_token(part: Feedforward, x: Tensor) -> Tensor:
    """The experts that each token of one row is routed to when it is alone, bool [T, experts]."""
    return torch.stack([_statistics(part, x[:, token : token + 1]).expert_counts > 0 for token in range(x.shape[1])])


def expert_permutation(config: ModelConfig) -> None:
    """Permuting the experts and the rows of their router leaves the output unchanged, unless a hash selects experts."""
    for part, mixture, x in _mixtures(config, scored=True):
        before = _forward(part, x)
        generator, groups = torch.Generator().manual_seed(7), mixture.groups
        inside = torch.rand(groups, mixture.num_experts // groups, generator=generator, device="cpu").argsort(1)
        starts = torch.randperm(groups, generator=generator, device="cpu")[:, None] * inside.shape[1]
        order = (starts + inside).flatten().to(x.device)
        with torch.no_grad():
            for parameter in (*mixture.router.parameters(recurse=False), *mixture.weights):
                parameter.copy_(parameter[order].clone())
        assert_close(_forward(part, x), before, "experts in another order")


def token_permutation(config: ModelConfig) -> None:
    """A feed-forward without a state handles each token separately: permuting the tokens permutes the outputs."""
    cases = [(part, x) for part, x in _each(model_under_test(config)) if part.window == 1]
    if not cases:
        raise DoesNotApply("its feed-forwards read earlier tokens")
    for part, x in cases:
        order = torch.randperm(ROWS * LENGTH, generator=torch.Generator().manual_seed(5), device="cpu").to(x.device)
        shuffled = x.flatten(0, 1)[order].view(x.shape)
        want = _forward(part, x).flatten(0, 1)[order].view(x.shape)
        assert_close(
            _forward(part, shuffled), want, "tokens in another order", TOLERANCE * max(1.0, float(want.abs().max()))
        )


def top_k_routing(config: ModelConfig) -> None:
    """Each token is routed to top_k experts, depends on their weights alone, and counts once for each."""
    for part, mixture, x in _mixtures(config):
        row = x[:1]
        chosen = _experts_of_each_token(part, row)
        if not bool((chosen.sum(1) == mixture.top_k).all()):
            raise LawViolation(f"tokens have {chosen.sum(1).tolist()} experts instead of top_k = {mixture.top_k}")
        if not torch.equal(_statistics(part, row).expert_counts, chosen.sum(0)):
            raise LawViolation("the loads of a row are not the sum over its tokens, one by one")
        y, _ = part(row, _with_ids(row))
        last = mixture.weights[-1]  # of the last projection: only hidden activations of zero can hide it
        for token in range(LENGTH):
            (slope,) = torch.autograd.grad(y[0, token].sum(), last, retain_graph=True)
            met = slope.flatten(1).abs().amax(1) > 0
            taken, alone = chosen[token], row[:, token : token + 1]
            if bool((met & ~taken).any()) or not (bool(met.any()) or _shows_nan(part, taken, alone)):
                raise LawViolation(f"token {token} depends on experts {met.nonzero().flatten().tolist()}, "
                             f"but was routed to {taken.nonzero().flatten().tolist()}")  # fmt: skip


@torch.no_grad()
def _shows_nan(part: Feedforward, experts: Tensor, x: Tensor) -> bool:
    """Whether NaN in the last projection of these experts, bool [experts], reaches the output: 0 · NaN is NaN."""
    poisoned = copy.deepcopy(part)
    assert poisoned.expert_info is not None
    poisoned.expert_info.weights[-1][experts] = NAN
    return not bool(_forward(poisoned, x).isfinite().all())


def idle_experts(config: ModelConfig) -> None:
    """An expert without tokens has gradient zero, and NaN in its weights changes no bit of anything."""
    for part, mixture, x in _mixtures(config):
        token = x[:1, :1].clone().requires_grad_()
        idle = _statistics(part, token.detach()).expert_counts == 0
        learned = [token, *(parameter for parameter in part.parameters() if parameter.requires_grad)]

        def both(
            learned: list[Tensor] = learned, part: Feedforward = part, mixture: ExpertInfo = mixture
        ) -> tuple[Tensor, tuple[Tensor, ...]]:
            y, _ = part(learned[0], _with_ids(learned[0]))
            gradients = torch.autograd.grad(y.sin().sum(), learned, allow_unused=True)
            if any(slope is None for slope, value in zip(gradients, learned, strict=True) if _within(value, mixture)):
                raise LawViolation("an expert without tokens has no gradient, instead of zero")
            return y.detach(), tuple(
                torch.zeros_like(v) if s is None else s for s, v in zip(gradients, learned, strict=True)
            )

        want = both()
        with torch.no_grad():
            for weight in mixture.weights:
                weight[idle] = NAN
        got = both()
        assert_bitwise_equal(got[0], want[0], "NaN in the weights of idle experts")
        for value, slope, before in zip(learned, got[1], want[1], strict=True):
            if not torch.equal(slope, before):
                raise LawViolation("NaN in the weights of idle experts changes a gradient")
            if _within(value, mixture) and bool(slope[idle].any()):
                raise LawViolation("an expert without tokens has a nonzero gradient")


def _within(value: Tensor, mixture: ExpertInfo) -> bool:
    return any(value is weight for weight in mixture.weights)


def routing_ties(config: ModelConfig) -> None:
    """Where router scores are equal, every token is routed to the experts with the lowest indices, if scores select."""
    for part, mixture, x in _mixtures(config, scored=True):
        with torch.no_grad():
            for parameter in mixture.router.parameters():
                parameter.zero_()
        for tokens in (x, torch.zeros_like(x)):
            loads = _statistics(part, tokens).expert_counts.tolist()
            want = [ROWS * LENGTH] * mixture.top_k + [0] * (mixture.num_experts - mixture.top_k)
            if loads != want:
                raise LawViolation(f"equal scores load the experts with {loads} instead of {want}")


def router_statistics(config: ModelConfig) -> None:
    """The router statistics of a call are the sum over its documents; padding is not counted."""
    for part, _, x in _mixtures(config):
        part.train()
        packed, padded = Layout.packed([[4, 3, 2], [1, 8]]), Layout.padded([5, LENGTH], side="left")
        parts = {
            "packed documents": (packed, [(0, 0, 4), (0, 4, 7), (0, 7, 9), (1, 0, 1), (1, 1, 9)]),
            "padded rows": (padded, [(0, 4, 9), (1, 0, 9)]),
        }
        for name, (layout, documents) in parts.items():
            batch = _statistics(part, x, layout)
            alone = [_statistics(part, x[row : row + 1, start:stop]) for row, start, stop in documents]
            for field in ("expert_counts", "entropy", "tokens", "aux_loss"):
                values = [getattr(entry, field) for entry in alone]
                reported = getattr(batch, field)
                if reported is None and all(value is None for value in values):
                    continue
                if float((reported - sum(values)).abs().max()) > TOLERANCE * max(1.0, float(reported.abs().max())):
                    raise LawViolation(f"{name}: {field} is {reported.tolist()}, but {values} for the documents alone")


def load_balancing(config: ModelConfig) -> None:
    """After a step, overloaded experts become less likely and idle ones more; balancing biases change no output."""
    for part, x in _each(model_under_test(config)):
        mixture = part.expert_info
        loads = torch.arange(1 if mixture is None else mixture.num_experts) * 2
        before = {name: value.detach().clone() for name, value in part.named_parameters()}
        bias = None if mixture is None else getattr(mixture.router, "expert_bias", None)
        y = _forward(part, x)
        part.update_expert_bias(loads)
        toward = torch.sign(loads.double().mean() - loads)
        for name, value in part.named_parameters():
            moved = value.detach() - before[name]
            if value is not bias and bool(moved.any()):
                raise LawViolation(f"balancing changes {name}, which is not a balancing bias")
            if value is bias and value.requires_grad:
                raise LawViolation(f"{name} is trained by its gradient, and balancing changes it")
            if value is bias:
                if bool((moved.sign() * toward < 0).any()):
                    raise LawViolation(f"{name}: an expert above the mean load became more likely")
                with torch.no_grad():
                    value.copy_(before[name] + 0.5)
        assert_close(_forward(part, x), y, "balancing biases were raised equally for all experts")
    next(_mixtures(config))


def router_precision(config: ModelConfig) -> None:
    """Router logits are computed in at least float32, also in bfloat16 and under autocast."""
    for _, mixture, x in _mixtures(config):
        rounded = copy.deepcopy(mixture.router).to(torch.bfloat16)
        rounded.requires_grad_(False)
        tokens = x.to(torch.bfloat16)
        want = copy.deepcopy(rounded).double()(tokens.double())
        logits = {"in bfloat16": rounded(tokens)}
        if torch.amp.is_autocast_available(x.device.type):
            with torch.autocast(x.device.type, torch.bfloat16):
                logits["under autocast"] = copy.deepcopy(rounded).float()(tokens.float())
        for name, got in logits.items():
            error = float((got.double() - want).abs().max())
            if got.dtype not in (torch.float32, torch.float64) or not error < 1e-5 * max(1.0, float(want.abs().max())):
                raise LawViolation(f"{name}, the router's logits are {got.dtype} and differ by {error:.1e}")


def token_isolation_in_training(config: ModelConfig) -> None:
    """In training, too, the output of a token does not depend on padding, later tokens or other rows."""
    for part, x in _each(model_under_test(config)):
        part.train()
        changed, others = x.clone(), x.flip(1) + 1.0

        def answer(tokens: Tensor, layout: Layout | None = None, part: Feedforward = part) -> Tensor:
            with use_random_key(RandomKey(3, 4, torch.arange(len(tokens)))):
                return _forward(part, tokens, layout)

        want = answer(x)
        changed[:, 4:] = others[:, 4:]
        bound = TOLERANCE * max(1.0, float(want.abs().max()))
        assert_close(answer(changed)[:, :4], want[:, :4], "in training, tokens from 4 on were changed", bound)
        for row in range(ROWS):  # rows that share a capacity fill it in order, so each row must be the changed one
            changed = x.clone()
            changed[row] = others[row]
            result = answer(changed)
            result[row] = want[row]
            assert_close(result, want, f"in training, row {row} was changed", bound)
        longer = torch.cat((x, others[:, :3]), dim=1)
        padded = answer(longer, Layout.padded([LENGTH] * ROWS, LENGTH + 3, side="right"))[:, :LENGTH]
        assert_close(padded, want, "in training, padding was added", bound)
        _refused_with_a_state(part, x)


def _refused_with_a_state(part: Feedforward, x: Tensor) -> None:
    _, layout = PositionTable.empty(ROWS, None, LENGTH, x.device).extend(Layout.causal(ROWS, LENGTH))
    call: Callable[[], Tensor] = lambda: _forward(part, x, layout)  # noqa: E731
    if part.expert_info is not None and part.expert_info.capacity_factor is not None:
        assert_refused(call, "capacity", "experts with a capacity factor were trained with a state")
    elif not bool(call().isfinite().all()):
        raise LawViolation("in training with a state, the output is not finite")
