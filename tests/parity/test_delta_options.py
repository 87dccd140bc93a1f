"""Options of the delta rules against a loop of the papers' formulas, value and gradient, and against transformers."""

import random
import warnings
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from heddle.config import kind_class, parse_config
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers.gated_delta import GatedDelta
from heddle.parts.modules.recurrent import BoundedDecay, DeltaRuleMixer, Preconditioner, in_steps
from heddle.parts.norms.rms import RMSConfig
from tests.cases import Data, by_day
from tests.laws.planting import Plant, calls, condition, result
from tests.parity.recurrence import (
    EPS,
    PIECES,
    WIDTH,
    compare_with_loop,
    inputs,
    loop_delta_rule,
    randomize,
)
from tests.parity.reference import close, compute_in_float64
from tests.parts.loops import in_pieces

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers import BailingHybridConfig, DynamicCache, Glm5NextTextConfig, OlmoHybridConfig
    from transformers.models.bailing_hybrid import modeling_bailing_hybrid
    from transformers.models.glm5_next import modeling_glm5_next
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid
    from transformers.models.qwen4_exp import modeling_qwen4_exp
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

DESIGNS = 96
TOLERANCE = 1e-9
PLANTED = 8  # designs by day, which show every planted bug
OLMO: Data = {
    "kind": "gated_delta", "heads": 4, "key_heads": 2, "head_dim": 5, "value_dim": 7, "negative_eigenvalues": True,
}  # fmt: skip


def ours(fields: Data, sharpness: float = 1.0) -> Any:
    """The mixer with random weights; those of β are multiplied by the sharpness, which brings β to its limits."""
    plain = {name: value for name, value in fields.items() if name != "kind"}
    config: Any = parse_config(kind_class("mixers", fields["kind"]), plain | {"norm": {"kind": "rms", "eps": EPS}})
    mixer = config.build(BuildContext(WIDTH, RMSConfig())).double().eval()
    randomize(mixer)
    with torch.no_grad():
        mixer.beta.weight.mul_(sharpness)
    return mixer


def random_fields(draw: random.Random) -> Data:
    heads = draw.choice([1, 2, 3, 4])
    fields: Data = {
        "kind": draw.choice(["gated_delta", "kda"]),
        "heads": heads,
        "head_dim": draw.randint(2, 7),
        "value_dim": draw.randint(2, 7),
        "conv_kernel": draw.randint(1, 4),
        "negative_eigenvalues": draw.random() < 0.7,
    }
    preconditioned = draw.random() < 0.4
    if preconditioned:
        fields |= {"preconditioned": True, "negative_eigenvalues": False}
    if fields["kind"] == "kda":
        fields |= {"gate_rank": draw.randint(1, 5), "decay_bound": draw.choice([None, 0.3, 1.0, 5.0])}
        if fields["gate_rank"] == 5:
            fields |= {"gate_rank": None, "full_gates": True}
        return fields | {"channel_gates": draw.random() < 0.6}
    key_heads = draw.choice([n for n in range(1, heads + 1) if heads % n == 0])
    fields |= {"key_heads": key_heads, "steps": 1 if preconditioned else draw.randint(1, 3)}
    return fields | {"gate": draw.choice(["silu", "sigmoid"])}


def random_rows(draw: random.Random) -> tuple[Layout, list[list[slice]]]:
    """A layout of two rows, and where the documents of each row are."""
    length = draw.randint(40, 75)
    ends = sorted(draw.sample(range(1, length), 3))
    documents = [[end - start for start, end in zip([0, *ends], [*ends, length], strict=True)], [length]]
    if draw.random() < 0.5:
        side = draw.choice(["left", "right"])
        starts = (length - ends[1], 0) if side == "left" else (0, 0)
        spans = [[slice(start, start + n)] for start, n in zip(starts, (ends[1], length), strict=True)]
        return Layout.padded([ends[1], length], side=side), spans
    spans = [[slice(sum(row[:i]), sum(row[: i + 1])) for i in range(len(row))] for row in documents]
    return Layout.packed(documents), spans


class Drawn(NamedTuple):
    """A random design, its input, the layout of its rows, and the outputs of the loop."""

    fields: Data
    sharpness: float
    x: Tensor
    layout: Layout
    spans: list[list[slice]]
    wanted: list[Tensor]
    slopes: list[Tensor]


@cache
def drawn(number: int) -> Drawn:
    """The loop's outputs and gradients, computed once for all bugs: it reads nothing but weights."""
    draw = random.Random(number)
    fields, (layout, spans) = random_fields(draw), random_rows(draw)
    sharpness = draw.choice([1.0, 8.0])
    mixer, x = ours(fields, sharpness), inputs(2, layout.length).requires_grad_()
    wanted = [loop_delta_rule(fields, mixer, x[row, span]) for row, row_spans in enumerate(spans) for span in row_spans]
    assert torch.cat(wanted).std() > 0.02, "outputs this small would agree whatever the module does"
    slopes = torch.autograd.grad(torch.cat(wanted).sin().sum(), [x, *mixer.parameters()])
    return Drawn(fields, sharpness, x, layout, spans, [each.detach() for each in wanted], list(slopes))


def largest_difference(number: int) -> float:
    """Of the outputs, and of the gradients of inputs and parameters, of a random design."""
    fields, sharpness, x, layout, spans, wanted, slopes = drawn(number)
    mixer = ours(fields, sharpness)
    y = mixer(x, layout)[0]
    actual = torch.cat([y[row, span] for row, row_spans in enumerate(spans) for span in row_spans])
    own = torch.autograd.grad(actual.sin().sum(), [x, *mixer.parameters()], materialize_grads=True)
    pairs = [(actual, torch.cat(wanted)), *zip(own, slopes, strict=True)]
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("number", by_day(PLANTED, DESIGNS))
def test_values_and_gradients_equal_a_loop_of_the_papers(number: int) -> None:
    assert largest_difference(number) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("number", range(0, DESIGNS, 8))
def test_decoding_equals_a_loop_of_the_papers(number: int) -> None:
    draw = random.Random(number)
    fields = random_fields(draw)
    compare_with_loop(ours(fields, sharpness=draw.choice([1.0, 8.0])), partial(loop_delta_rule, fields))


BUGS: dict[str, Plant] = {
    "β without its factor 2": condition(DeltaRuleMixer._delta_rule, "negative_eigenvalues", False),
    "a factor 2 for every β": condition(DeltaRuleMixer._delta_rule, "negative_eigenvalues", True),
    "a bound whose rate is no exponential": calls(BoundedDecay.forward, "exp", lambda rate: rate),
    "a bounded decay without its bias": calls(
        BoundedDecay.forward, "at_least_float32", lambda wide, x: 0 * wide(x), nth=1
    ),
    "a decay before each step": calls(
        in_steps, "pad", lambda _, x, sides: x.expand(*x.shape[:3], 1 + sum(sides), -1), nth=1
    ),
    "a state read before the last step": calls(
        in_steps, "pad", lambda functional, x, sides: functional.pad(x, (0, 0, *sides[:1:-1])), nth=0
    ),
    "heads and steps exchanged": calls(
        in_steps, "unflatten", lambda x, dim, sizes: x.unflatten(dim, sizes[::-1]).transpose(1, 2)
    ),
    "a gate that is always SiLU": condition(GatedDelta.__init__, "gate", True),
    "writing gates of double size": calls(
        DeltaRuleMixer._delta_rule, "split_heads", lambda split, x, heads: 2 * split(x, heads), nth=3
    ),
    "a preconditioner that scales by its inverse": calls(
        Preconditioner.forward, "softsign", lambda functional, x: -functional.softsign(x)
    ),
    "a preconditioner without its center": calls(
        Preconditioner.forward, "at_least_float32", lambda wide, x: 0 * wide(x), nth=1
    ),
    "keys scaled where they read, too": calls(
        DeltaRuleMixer._delta_rule, "DeltaInputs", lambda make, *fields: make(*fields[:-1], None)
    ),
    "a bounded decay of the other sign": result(BoundedDecay.forward, lambda pair: (-pair[0], pair[1])),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught_by_the_loop(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    assert any(largest_difference(number) > 1e-3 for number in range(PLANTED))


# transformers


OLMO_NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "a": "a_proj", "beta": "b_proj", "gate": "g_proj",
              "norm": "o_norm", "out": "o_proj"}  # fmt: skip


def olmo_config(mixer: Any, negative: bool = True) -> Any:
    return OlmoHybridConfig(
        hidden_size=WIDTH,
        linear_num_key_heads=mixer.key_heads,
        linear_num_value_heads=mixer.heads,
        linear_key_head_dim=mixer.head_dim,
        linear_value_head_dim=mixer.value_dim,
        linear_conv_kernel_dim=mixer.conv_kernel,
        linear_allow_neg_eigval=negative,
        num_hidden_layers=2,
        num_attention_heads=4,
    )


def olmo(mixer: Any, negative: bool = True) -> Any:
    """OLMo Hybrid's module with our weights."""
    module, own = modeling_olmo_hybrid.OlmoHybridGatedDeltaNet(olmo_config(mixer, negative), 0), mixer.state_dict()
    weights = {f"{theirs}.weight": own[f"{name}.weight"] for name, theirs in OLMO_NAMES.items()}
    weights |= {"conv1d.weight": own["convolution.weight"][:, None]}
    weights |= {"A_log": own["decay.rate"], "dt_bias": own["decay.bias"]}
    module.double().eval().load_state_dict(weights)
    module.o_norm.variance_epsilon = EPS
    return module


@pytest.mark.parametrize("sharpness", [1.0, 8.0])
def test_negative_eigenvalues_equal_those_of_olmo_hybrid(sharpness: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once with gradients, decoded with their cache, and padded on the left."""
    compute_in_float64(monkeypatch, modeling_olmo_hybrid)
    mixer = ours(OLMO, sharpness)
    compare_with_module(mixer, olmo(mixer), olmo_config(mixer))
    with torch.no_grad():
        x = inputs(2)
        assert float((mixer(x, Layout.causal(*x.shape[:2]))[0] - olmo(mixer, negative=False)(x)).abs().max()) > 0.1


@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
def test_a_gate_of_the_norm_equals_that_of_qwen4(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `Qwen4ExpTextRMSNormGated`, within its linear layer."""
    compute_in_float64(monkeypatch, modeling_qwen4_exp)
    mixer = ours(OLMO | {"negative_eigenvalues": False, "gate": gate})
    config = Qwen4ExpTextConfig(
        hidden_size=WIDTH,
        linear_num_key_heads=mixer.key_heads,
        linear_num_value_heads=mixer.heads,
        linear_key_head_dim=mixer.head_dim,
        linear_value_head_dim=mixer.value_dim,
        linear_conv_kernel_dim=mixer.conv_kernel,
        output_gate_type=gate,
        num_hidden_layers=4,
        rms_norm_eps=EPS,
    )
    own = mixer.state_dict()
    names = {"a": "in_proj_a", "beta": "in_proj_b", "gate": "in_proj_z", "norm": "norm", "out": "out_proj"}
    weights = {f"{theirs}.weight": own[f"{name}.weight"] for name, theirs in names.items()}
    weights |= {"in_proj_qkv.weight": torch.cat([own[f"{name}.weight"] for name in "qkv"])}
    weights |= {"conv1d.weight": own["convolution.weight"][:, None]}
    weights |= {"A_log": own["decay.rate"], "dt_bias": own["decay.bias"]}
    module = modeling_qwen4_exp.Qwen4ExpTextGatedDeltaNet(config, 0)
    module.double().eval().load_state_dict(weights)
    compare_with_module(mixer, module, config)


KDA_NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "beta": "b_proj", "norm": "o_norm", "out": "o_proj"}
LOW_RANK = {"decay_down": "forget_gate.f_a_proj", "decay_up": "forget_gate.f_b_proj", "gate_down": "g_a_proj",
            "gate_up": "g_b_proj"}  # fmt: skip
SIZES: Data = {"kind": "kda", "heads": 3, "head_dim": 8, "conv_kernel": 3}


def kda_weights(mixer: Any) -> Data:
    own = mixer.state_dict()
    weights = {f"{theirs}.weight": own[f"{name}.weight"] for name, theirs in KDA_NAMES.items()}
    weights |= {"conv1d.weight": own["convolution.weight"][:, None]}
    return weights | {"forget_gate.A_log": own["decay.rate"], "forget_gate.dt_bias": own["decay.bias"]}


@pytest.mark.parametrize("bound", [None, 0.7, 5.0])
def test_a_bounded_decay_equals_that_of_glm_5_next(bound: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in_float64(monkeypatch, modeling_glm5_next)
    mixer = ours(SIZES | {"decay_bound": bound})
    config = Glm5NextTextConfig(
        hidden_size=WIDTH,
        linear_num_heads=3,
        linear_head_dim=8,
        linear_conv_kernel_dim=3,
        linear_lower_bound=None if bound is None else -bound,
        num_hidden_layers=4,
        rms_norm_eps=EPS,
    )
    own = mixer.state_dict()
    weights = kda_weights(mixer) | {f"{theirs}.weight": own[f"{name}.weight"] for name, theirs in LOW_RANK.items()}
    module = modeling_glm5_next.Glm5NextTextLinearAttention(config, 0)
    module.double().eval().load_state_dict(weights)
    compare_with_module(mixer, module, config)


@pytest.mark.parametrize("bound", [None, 5.0])
def test_a_bounded_decay_equals_that_of_bailing_hybrid(bound: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its projections of decay and gate are whole matrices."""
    compute_in_float64(monkeypatch, modeling_bailing_hybrid)
    mixer = ours(SIZES | {"decay_bound": bound, "full_gates": True})
    config = BailingHybridConfig(
        hidden_size=WIDTH,
        num_attention_heads=3,
        head_dim=8,
        short_conv_kernel_size=3,
        kda_safe_gate=bound is not None,
        kda_lower_bound=-(bound or 1.0),
        num_hidden_layers=2,
        rms_norm_eps=EPS,
    )
    own = mixer.state_dict()
    weights = kda_weights(mixer) | {
        "forget_gate.f_proj.weight": own["decay_up.weight"],
        "g_proj.weight": own["gate_up.weight"],
    }
    module = modeling_bailing_hybrid.BailingHybridDeltaAttention(config, 0)
    module.double().eval().load_state_dict(weights)
    compare_with_module(mixer, module, config)


def compare_with_module(mixer: Any, module: Any, config: Any) -> None:
    x = inputs(2).requires_grad_()
    y, expected = mixer(x, Layout.causal(*x.shape[:2]))[0], module(x)
    close(y, expected)
    close(*(torch.autograd.grad(out.sin().sum(), x)[0] for out in (y, expected)))
    with torch.no_grad():
        cache = DynamicCache(config=config)
        close(in_pieces(mixer, x, PIECES), decoded(module, x, cache))
        layout = Layout.padded([23, 9, 2])
        padded, real = inputs(3, 23), layout.positions >= 0
        close(mixer(padded, layout)[0][real], module(padded, attention_mask=real.long())[real])


def decoded(module: Any, x: Tensor, cache: Any) -> Tensor:
    return torch.cat([module(piece, cache_params=cache) for piece in x.split(PIECES, dim=1)], dim=1)
