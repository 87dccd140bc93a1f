"""Feed-forwards: each activation and each kind against its formula."""

import math
import random
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch.nn import functional
from transformers import Gemma3nTextConfig
from transformers.models.deepseek_v4 import DeepseekV4Config, modeling_deepseek_v4
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from heddle.config import DesignError, parse_config
from heddle.laws.harness import normal_tensor
from heddle.numerics.activations import GATED, LEARNED, PLAIN, above_quantile, normal_quantile, swiglu_limited, xielu
from heddle.numerics.activations import activation as registered_activation
from heddle.numerics.random import ParameterDraws
from heddle.parts.build import BuildContext
from heddle.parts.feedforwards import FeedforwardConfig, mlp
from heddle.parts.feedforwards.gated import Gated, GatedConfig
from heddle.parts.feedforwards.mlp import XIELU, MLPConfig
from heddle.parts.layout import Layout
from heddle.parts.norms.rms import RMSConfig
from tests.cases import by_day
from tests.laws.planting import Plant, calls, operand_dropped, result
from tests.parts.loops import Errors, assert_none, errors

FORMULAS: dict[str, Callable[[float], float]] = {
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + math.exp(-x)),
}


def test_clamped() -> None:
    """As in gpt-oss: gate and up are clamped above, up below too; 1 is added to up; the sigmoid is steeper."""
    data = {"kind": "gated", "hidden": 7, "activation": "swiglu_clamped", "limit": 0.5}
    config = parse_config(FeedforwardConfig, data)  # type: ignore[type-abstract]
    context = BuildContext(5, RMSConfig())
    part = config.build(context).double()
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    with torch.no_grad():
        for value in part.parameters():
            value.normal_()
        gate, up = (x @ part.get_parameter(f"{role}.weight").T for role in ("gate", "up"))
        hidden = [
            (max(-0.5, min(u, 0.5)) + 1) * min(g, 0.5) / (1 + math.exp(-1.702 * min(g, 0.5)))
            for u, g in zip(up.flatten().tolist(), gate.flatten().tolist(), strict=True)
        ]
        want = torch.tensor(hidden, dtype=torch.float64).view(up.shape) @ part.get_parameter("down.weight").T
        torch.testing.assert_close(part(x, Layout.causal(2, 3))[0], want, rtol=0, atol=1e-10)
    assert config.resolved(context).dump() == data | {"alpha": 1.702, "bias": False, "dropout": 0.0}


@pytest.mark.parametrize("plant", [None, result(swiglu_limited, lambda y: y + 0.01)])
def test_limited(plant: Plant | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSeek V4's shared expert, to the last bit but for sums."""
    config = DeepseekV4Config(hidden_size=5, moe_intermediate_size=7, swiglu_limit=0.5)
    theirs = modeling_deepseek_v4.DeepseekV4MLP(config).double()
    fields = {"kind": "gated", "hidden": 7, "activation": "swiglu_limited", "limit": 0.5}
    if plant is not None:
        plant(monkeypatch)
    part = parse_config(FeedforwardConfig, fields).build(BuildContext(5, RMSConfig())).double()  # type: ignore[type-abstract]
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    with torch.no_grad():
        for name in ("gate", "up", "down"):
            part.get_parameter(f"{name}.weight").copy_(theirs.get_parameter(f"{name}_proj.weight").normal_())
        apart = float((part(x, Layout.causal(2, 3))[0] - theirs(x)).abs().max())
    assert (apart < 1e-12) == (plant is None)


def xielu_formula(x: float, a_p: float, a_n: float) -> float:
    """Huang & Schlag 2024, with β = 1/2 and ε = −1e-6."""
    alpha_p, alpha_n = math.log1p(math.exp(a_p)), 0.5 + math.log1p(math.exp(a_n))
    if x > 0:
        return alpha_p * x**2 + 0.5 * x
    return alpha_n * (math.expm1(min(x, -1e-6)) - x) + 0.5 * x


WRONG_XIELU: dict[str, Callable[..., torch.Tensor]] = {
    "exchanged": lambda x, a_p, a_n, beta, eps: xielu(x, a_n, a_p, beta, eps),
    "no linear part": lambda x, a_p, a_n, beta, eps: xielu(x, a_p, a_n, beta, eps) - beta * x,
}


@pytest.mark.parametrize("wrong", [None, *WRONG_XIELU])
def test_xielu(wrong: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two learned numbers start at α = 0.8 on both sides; a planted bug exchanges them, or forgets β x."""
    data = {"kind": "mlp", "hidden": 7, "activation": "xielu"}
    part = parse_config(FeedforwardConfig, data).build(BuildContext(5, RMSConfig())).double()  # type: ignore[type-abstract]
    learned = part.get_submodule("activation")
    assert isinstance(learned, XIELU)
    learned.init_weights(0.02, ParameterDraws(0, ""))
    assert [parameter.requires_grad for parameter in learned.parameters()] == [True, True, False, False]
    with torch.no_grad():
        starts = [float(functional.softplus(learned.a_p)), 0.5 + float(functional.softplus(learned.a_n))]
    assert starts == pytest.approx([0.8, 0.8], abs=1e-12)
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    with torch.no_grad():
        for name in ("up.weight", "down.weight", "activation.a_p", "activation.a_n"):
            part.get_parameter(name).normal_()
        a_p, a_n = float(learned.a_p), float(learned.a_n)
        up = x @ part.get_parameter("up.weight").T
        assert (up > 0).any()
        assert (up < 0).any()
        hidden = torch.tensor([xielu_formula(u, a_p, a_n) for u in up.flatten().tolist()], dtype=torch.float64)
        want = hidden.view(up.shape) @ part.get_parameter("down.weight").T
        if wrong is None:
            torch.testing.assert_close(part(x, Layout.causal(2, 3))[0], want, rtol=0, atol=1e-10)
        else:
            monkeypatch.setattr(mlp, "xielu", WRONG_XIELU[wrong])
            assert float((part(x, Layout.causal(2, 3))[0] - want).abs().max()) > 0.01


def largest_errors(seed: int) -> Errors:
    """Of `mlp` with xIELU, beside its formula of one number at a time; gradients of x and of all that is learned."""
    draw = random.Random(seed)
    width, hidden = draw.randint(1, 8), draw.randint(1, 9)
    data = {"kind": "mlp", "hidden": hidden, "activation": "xielu", "bias": draw.random() < 0.5}
    part: Any = parse_config(FeedforwardConfig, data).build(BuildContext(width, RMSConfig()))  # type: ignore[type-abstract]
    part.activation.init_weights(0.02, ParameterDraws(0, ""))
    generator = torch.Generator().manual_seed(seed)
    learned = [each for each in part.double().parameters() if each.requires_grad]
    with torch.no_grad():
        for value in learned:
            value.copy_(normal_tensor(tuple(value.shape), generator))
    x = (2.0 * normal_tensor((1, draw.randint(1, 7), width), generator)).requires_grad_()
    alpha_p = torch.log(1 + torch.exp(part.activation.a_p))
    alpha_n = 0.5 + torch.log(1 + torch.exp(part.activation.a_n))
    rows = []
    for token in x[0]:
        numbers = []
        for u in part.up.weight @ token + (0.0 if part.up.bias is None else part.up.bias):
            negative = alpha_n * (torch.exp(u if u < -1e-6 else u.new_tensor(-1e-6)) - 1 - u)
            numbers.append((alpha_p * u * u if u > 0 else negative) + u / 2)
        y = part.down.weight @ torch.stack([number.squeeze() for number in numbers])
        rows.append(y if part.down.bias is None else y + part.down.bias)
    return errors(part(x, Layout.causal(1, x.shape[1]))[0][0], torch.stack(rows), [x, *learned])


@pytest.mark.parametrize("seed", by_day(12, 48))
def test_xielu_and_its_gradients_are_those_of_its_formula(seed: int) -> None:
    assert_none(largest_errors(seed))


@pytest.mark.parametrize("wrong", WRONG_XIELU)
def test_the_formula_sees_a_wrong_xielu(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "xielu", WRONG_XIELU[wrong])
    assert largest_errors(1)[0] > 1e-3


@pytest.mark.parametrize("wrong", [None, "gate_multiplier", "multiplier"])
def test_multipliers(wrong: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Falcon-H1: one number of the gate before its activation, one of the output; a planted bug forgets one."""
    data = {"kind": "gated", "hidden": 7, "bias": True, "gate_multiplier": 0.6, "multiplier": 1.4}
    part = parse_config(FeedforwardConfig, data).build(BuildContext(5, RMSConfig())).double()  # type: ignore[type-abstract]
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    with torch.no_grad():
        for value in part.parameters():
            value.normal_()
        gate, up = (x @ part.get_parameter(f"{n}.weight").T + part.get_parameter(f"{n}.bias") for n in ("gate", "up"))
        hidden = up * (0.6 * gate) / (1 + torch.exp(-0.6 * gate))
        want = 1.4 * (hidden @ part.get_parameter("down.weight").T + part.get_parameter("down.bias"))
        if wrong is None:
            torch.testing.assert_close(part(x, Layout.causal(2, 3))[0], want, rtol=0, atol=1e-10)
        else:
            operand_dropped(Gated.forward, wrong)(monkeypatch)
            assert float((part(x, Layout.causal(2, 3))[0] - want).abs().max()) > 0.01


@pytest.mark.parametrize("number", range(40))
def test_sparse_gates_are_those_of_gemma3n(number: int) -> None:
    """Values and gradients against transformers, on random designs."""
    draw = random.Random(number)
    width, hidden, sparsity = draw.randint(2, 9), draw.randint(2, 40), round(draw.uniform(0.05, 0.95), 3)
    settings = {"hidden_size": width, "intermediate_size": hidden, "hidden_activation": "gelu_pytorch_tanh"}
    pattern = {"num_hidden_layers": 1, "activation_sparsity_pattern": [sparsity], "num_attention_heads": 1}
    theirs = Gemma3nTextMLP(Gemma3nTextConfig(**settings, **pattern)).double()
    part = sparse(width, hidden, sparsity)
    with torch.no_grad():
        for name in ("gate", "up", "down"):
            theirs.get_parameter(f"{name}_proj.weight").copy_(part.get_parameter(f"{name}.weight"))
    x = torch.randn(2, 3, width, dtype=torch.float64, requires_grad=True)
    values = part(x, Layout.causal(2, 3))[0], theirs(x)
    torch.testing.assert_close(*values, rtol=0, atol=1e-9)
    gradients = (torch.autograd.grad(value.sin().sum(), x)[0] for value in values)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)


def sparse(width: int, hidden: int, sparsity: float) -> Any:
    data = {"kind": "gated", "hidden": hidden, "activation": "gelu_tanh", "sparsity": sparsity}
    part = parse_config(FeedforwardConfig, data).build(BuildContext(width, RMSConfig())).double()  # type: ignore[type-abstract]
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.normal_()
    return part


def test_the_share_of_zeros_is_the_sparsity(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 4096)
    for sparsity in (0.3, 0.95):
        kept = above_quantile(x, normal_quantile(sparsity))
        assert float((kept == 0).double().mean()) == pytest.approx(sparsity, abs=0.005)
    part, inputs = sparse(5, 30, 0.8), torch.randn(2, 3, 5, dtype=torch.float64)
    want = part(inputs, Layout.causal(2, 3))[0]
    calls(Gated.forward, "above_quantile", lambda above, gate, quantile: gate.relu(), 0)(monkeypatch)
    assert float((part(inputs, Layout.causal(2, 3))[0] - want).detach().abs().max()) > 0.01


def test_equal_gates_have_finite_gradients() -> None:
    x = torch.zeros(2, 5, requires_grad=True)
    above_quantile(x, 1.0).sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "gated", "hidden": 1, "sparsity": 0.5}, r"sparsity: leaves nothing of one"),
        ({"kind": "gated", "limit": 7.0}, r"limit: 7.*swiglu_clamped"),
        ({"kind": "moe", "experts": 2, "top_k": 1, "alpha": 2.0}, r"alpha: 2.*swiglu_clamped"),
        ({"kind": "moe", "experts": 2, "top_k": 1, "expert": "mlp", "activation": "swiglu_clamped"}, "needs a gate"),
        ({"kind": "mlp", "activation": "swiglu_clamped"}, "activation:"),
    ],
)
def test_unused_limits_raise(data: dict[str, Any], message: str) -> None:
    with pytest.raises(DesignError, match=message):
        parse_config(FeedforwardConfig, {"hidden": 4, **data})  # type: ignore[type-abstract]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["mlp", "gated"])
@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name: str, kind: str, bias: bool) -> None:
    data = {"kind": kind, "hidden": 7, "activation": name, "bias": bias}
    config = parse_config(FeedforwardConfig, data)  # type: ignore[type-abstract]
    context = BuildContext(5, RMSConfig())
    part = config.build(context).double()
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    weights = dict(part.named_parameters())
    assert len(weights) == (3 if kind == "gated" else 2) * (2 if bias else 1)
    with torch.no_grad():
        for value in weights.values():
            value.normal_()

        def project(role: str, z: torch.Tensor) -> torch.Tensor:
            y = z @ weights[f"{role}.weight"].T
            return y + weights[f"{role}.bias"] if bias else y

        first = project("gate" if kind == "gated" else "up", x)
        hidden = torch.tensor([FORMULAS[name](v) for v in first.flatten().tolist()], dtype=torch.float64)
        hidden = hidden.view(first.shape) * (project("up", x) if kind == "gated" else 1.0)
        got = part(x, Layout.causal(2, 3))[0]
    torch.testing.assert_close(got, project("down", hidden), rtol=0, atol=1e-10)


def test_configs_allow_every_activation_that_is_registered() -> None:
    plain, all_names = (get_args(cls.model_fields["activation"].annotation) for cls in (MLPConfig, GatedConfig))
    assert plain == (*PLAIN, *LEARNED)
    assert all_names == (*PLAIN, *GATED)
    up, gate = torch.randn(2, 3, 5)
    for name in all_names:
        assert registered_activation(name)(up, gate).shape == up.shape
