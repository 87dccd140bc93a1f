"""Transfer over width: the factors against the papers' table, refusals, and runs at the base width and beyond."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from heddle.config import load_part
from heddle.data.corpus import Corpus
from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.load_config import load_config
from heddle.training.init_checkpoint import open_init_checkpoint
from heddle.training.loop import train
from heddle.training.optimizer import ParameterScale, build_optimizer
from heddle.training.step import accumulate_gradients
from heddle.training.width_transfer import scale_to_width, transfer_over_width
from tests import small
from tests.cases import CASES, attention, design, layer
from tests.training.coordinates import BATCH

BASE, WIDTH = 16, 64  # m = 4
Factors = tuple[float, float, float]  # of initial std, learning rate, ε

MQA = {"kind": "attention", "heads": 16, "kv_heads": 1, "bias": True, "gate": "head", "sink": True}
MLA = {"kind": "latent_attention", "heads": 16, "kv_rank": 32, "query_rank": 32, "nope_dim": 4}
GDN = {"kind": "gated_delta", "heads": 16, "key_heads": 8, "head_dim": 4}
EXPERTS = {"kind": "moe", "experts": 3, "top_k": 1, "hidden": 64, "shared": 1, "router_bias": True}
LEARNED = {"kind": "linear_attention", "heads": 16, "feature_map": "learned"}

# Yang et al. 2022, table 3, for m = 4: (initial std, rate, ε) of matrices that grow on both sides, of those whose
# outputs stay, of those whose inputs stay, and of vectors that grow.
HIDDEN, TO_FEW, FROM_FEW, VECTOR, FIXED = (
    (1 / 2, 1 / 4, 1 / 4), (1 / 4, 1 / 4, 1.0), (1.0, 1.0, 1 / 4), (1.0, 1.0, 1 / 4), (1.0, 1.0, 1.0),
)  # fmt: skip
TABLE: dict[str, Factors] = {
    "embed.weight": FROM_FEW,
    "final_norm.norm.weight": VECTOR,
    "head.weight": TO_FEW,
    "layers.0.residual.norms.mixer.weight": VECTOR,
    "layers.0.mixer.q.weight": HIDDEN,
    "layers.0.mixer.q.bias": VECTOR,
    "layers.0.mixer.k.weight": TO_FEW,
    "layers.0.mixer.k.bias": FIXED,
    "layers.0.mixer.v.weight": TO_FEW,
    "layers.0.mixer.gate.weight": HIDDEN,
    "layers.0.mixer.sink": VECTOR,
    "layers.0.mixer.out.weight": HIDDEN,
    "layers.0.feedforward.router.weight": TO_FEW,
    "layers.0.feedforward.router.bias": FIXED,
    "layers.0.feedforward.up.weight": HIDDEN,
    "layers.0.feedforward.shared.down.weight": HIDDEN,
    "layers.1.mixer.kv_down.weight": HIDDEN,
    "layers.1.mixer.v_up.weight": HIDDEN,
    "layers.2.mixer.q.weight": HIDDEN,
    "layers.2.mixer.a.weight": HIDDEN,
    "layers.2.mixer.convolution.weight": VECTOR,
    "layers.2.mixer.decay.rate": VECTOR,
    "layers.2.mixer.norm.weight": FIXED,
    "layers.3.mixer.q_map.weight": (1.0, 1.0, 1 / 4),  # a matrix of fixed size in each head
}
# The rate of Muon: sqrt(m_out / m_in) over the growth of sqrt(larger side).
MUON_RATES = {HIDDEN: 1 / 2, TO_FEW: 1 / 4}


def wide_design(**fields: Any) -> dict[str, Any]:
    layers = [layer(MQA, EXPERTS), layer(MLA), layer(GDN), layer(LEARNED)]
    return design(*layers, width=WIDTH, **fields)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_factors_are_those_of_the_table(optimizer: str) -> None:
    scales = transfer_over_width(load_config(wide_design(head={"tied": False})), BASE, optimizer).scales
    for name, (std, rate, epsilon) in TABLE.items():
        if optimizer == "muon" and name.startswith("layers.") and (std, rate, epsilon) in MUON_RATES:
            rate, epsilon = MUON_RATES[std, rate, epsilon], 1.0
        elif optimizer == "muon" and name == "layers.3.mixer.q_map.weight":
            epsilon = 1.0  # Muon has none
        assert scales[name] == pytest.approx((std, rate, epsilon), rel=1e-12), name


def test_a_tied_head_divides_its_logits() -> None:
    """The weight stays that of an embedding. A bias is divided like the logits, so its rate grows."""
    config = load_config(wide_design(head={"tied": True, "bias": True, "scale": 0.5}))
    transfer = transfer_over_width(config, BASE)
    assert transfer.config.head.scale == 0.5
    assert transfer.config.head.width_scale == 1 / 4
    assert transfer.scales["embed.weight"] == ParameterScale(epsilon=1 / 4)
    assert transfer.scales["head.bias"] == ParameterScale(4.0, 4.0, 1 / 4)
    grown = transfer_over_width(config.replace(embedding=config.embedding.replace(scale=True)), BASE)
    assert grown.config.head.width_scale == 1 / 2  # rows and their rates are halved, because sqrt(width) doubled
    assert grown.scales["embed.weight"] == ParameterScale(1 / 2, 1 / 2, 1 / 2)


@pytest.mark.parametrize("embedding_scale", [True, False])
def test_transfer_is_applied_once_however_often_it_is_asked(embedding_scale: bool) -> None:
    """A run's design carries its factor: another transfer replaces it, at any width, and at the base width drops it."""
    data = wide_design(head={"tied": True, "scale": 0.5}, embedding={"scale": embedding_scale})
    config = load_config(data)
    transfer = transfer_over_width(config, BASE)
    of_a_run = load_config(transfer.config.dump())
    assert transfer_over_width(of_a_run, BASE) == transfer
    assert transfer_over_width(of_a_run, 32).config == transfer_over_width(config, 32).config
    assert transfer_over_width(of_a_run, WIDTH).config == config
    assert transfer_over_width(of_a_run, None).config == of_a_run
    wider = scale_to_width(of_a_run, 128)
    assert transfer_over_width(wider, BASE).config == transfer_over_width(scale_to_width(config, 128), BASE).config


def test_a_design_with_its_factor_is_exported_and_built_as_the_product() -> None:
    config = load_config(wide_design(head={"tied": True, "scale": 0.5, "width_scale": 0.25}))
    assert config.resolved() == load_config(wide_design(head={"tied": True, "scale": 0.125})).resolved()
    assert build(config, device="meta").head.scale == 0.125


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_as_small_as_epsilon(tied: bool) -> None:
    """ε of a parameter follows the size of its gradient, so that its part in an update is the same at every width."""
    config = load_config(design(layer(attention(2), repeat=2), width=32, head={"tied": tied}))
    narrow, wide = (_gradients(transfer_over_width(scale_to_width(config, width), 32)) for width in (32, 256))
    scales = transfer_over_width(scale_to_width(config, 256), 32).scales
    ratios = {name: float(wide[name] / narrow[name] / scales[name].epsilon) for name in narrow}
    assert {name: ratio for name, ratio in ratios.items() if not 0.6 < ratio < 1.6} == {}


def _gradients(transfer: Any) -> dict[str, torch.Tensor]:
    model: Decoder = transfer.build_model()
    accumulate_gradients(model, BATCH, (0, 0))
    return {
        name: parameter.grad.abs().mean() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_decay_times_rate_and_the_drawn_numbers_stay(optimizer: str) -> None:
    config = load_config(wide_design(head={"tied": False}))
    transfer = transfer_over_width(config, BASE, optimizer)
    drawn, model = build(config, seed=3), transfer.build_model(seed=3)
    for (name, plain), parameter in zip(drawn.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(plain * transfer.scales[name].initial_std, parameter), name
    built = build_optimizer(model, 0.25, optimizer, [("layers.2", 0.5)], transfer.scales)
    groups = {
        id(tensor): group for part in built.optimizers for group in part.param_groups for tensor in group["params"]
    }
    for name in ("layers.0.mixer.q.weight", "layers.2.mixer.q.weight", "embed.weight", "head.weight"):
        scale, lr_scale = transfer.scales[name], 0.5 if name.startswith("layers.2") else 1.0
        group = groups[id(model.get_parameter(name))]
        assert group["factor"] == pytest.approx(lr_scale * scale.learning_rate)
        assert group["factor"] * group["weight_decay"] == pytest.approx(lr_scale * 0.25)
        if optimizer == "adamw":
            assert group["eps"] == pytest.approx(1e-8 * scale.epsilon)


def refusal(config: ModelConfig) -> str:
    """Why a design has no version of twice its width; empty if it has one."""
    try:
        transfer_over_width(config, 2 * config.width)
    except ConfigError as error:
        return str(error)
    return ""


def test_every_kind_is_covered_or_refused_by_name() -> None:
    configs = [load_config(data) for data in CASES.values()]
    by_kinds = {
        (
            config.residual.kind,
            tuple(
                (layer.mixer and layer.mixer.kind, layer.feedforward and layer.feedforward.kind)
                for _, layer in config.expand()
            ),
        ): config
        for config in configs
    }
    reasons = {reason for config in by_kinds.values() if (reason := refusal(config))}
    mixer = "retention's decays depend on the number of heads, so it has no version at another width"
    assert reasons == {
        "transfer_width 48: encoder: cannot be scaled to another width; leave it out",
        f"transfer_width 48: layers[0].mixer.second: {mixer}; choose another mixer",
        f"transfer_width 48: layers[0].mixer: {mixer}; choose another mixer",
        f"transfer_width 48: layers[1].mixer: {mixer}; choose another mixer",
        f"transfer_width 48: layers[3].mixer: {mixer}; choose another mixer",
    }


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            design(layer(attention(3))),
            "layers[0].mixer.heads: 3",
        ),
        (
            design(layer({"kind": "pair", "first": attention(2), "second": attention(6, kv_heads=3)})),
            "layers[0].mixer.second.kv_heads: 3",
        ),
        (CASES["encoder"], "encoder:"),
    ],
)
def test_a_width_that_a_design_does_not_have_is_refused(data: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        transfer_over_width(load_config(data), 12)
    assert str(caught.value).startswith(f"transfer_width 12: {says}")


SQUARE = '''"""A feed-forward whose hidden channels are the square of the width."""
from heddle.parts.feedforwards import Feedforward, FeedforwardConfig
from heddle.parts.modules.linear import Linear


class SquareConfig(FeedforwardConfig):
    def build(self, context):
        return Square(context.width)


class Square(Feedforward):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = Linear(width, width * width), Linear(width * width, width)

    def forward(self, x, layout, state=None):
        return self.down(self.up(x).relu()), None
'''


def test_a_part_that_grows_in_another_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "square.py").write_text(SQUARE, encoding="utf-8")
    load_part(tmp_path / "square.py")
    try:
        config = load_config(design(layer(attention(2), {"kind": "square"})))
        with pytest.raises(ConfigError, match=r"^transfer_width 12: layers\.0\.feedforward\.up\.weight.*\[144, 12\]"):
            transfer_over_width(config, 12)
    finally:
        small.forget_parts()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_at_its_own_width_nothing_changes(texts: Corpus, tmp_path: Path, optimizer: str) -> None:
    results = [
        train(small.job(texts, tmp_path / str(width), steps=4, optimizer=optimizer, transfer_width=width))
        for width in (None, 16)
    ]
    assert results[0].scores == results[1].scores
    assert results[0].model.config == results[1].model.config
    parameters = [list(result.model.parameters()) for result in results]
    assert all(torch.equal(a, b) for a, b in zip(*parameters, strict=True))


def test_a_run_at_another_width_resumes_and_is_saved_with_its_logits(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.same_after_a_signal(lambda name: small.job(texts, tmp_path / name, transfer_width=32), monkeypatch)
    init_checkpoint = open_init_checkpoint(tmp_path / "whole")
    assert init_checkpoint.config.head.width_scale == 2.0
    job = small.job(texts, tmp_path / "from", transfer_width=32)
    job = dataclasses.replace(job, config=init_checkpoint.config, init_checkpoint=init_checkpoint)
    with pytest.raises(ConfigError, match=r"^transfer_width 32:"):
        train(job)
    assert not (tmp_path / "from").exists()


def test_settings_without_a_width_are_those_of_earlier_runs(texts: Corpus, tmp_path: Path) -> None:
    assert "transfer_width" not in small.job(texts, tmp_path).settings.identity()
    assert small.job(texts, tmp_path, transfer_width=8).settings.identity()["transfer_width"] == 8
