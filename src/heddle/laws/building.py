"""Building, writing and sizing: a config and a state dict define a model completely."""

import json

import torch
import yaml
from torch import Tensor

from heddle.config import parse_config
from heddle.laws.harness import (
    ENCODER_LENGTH,
    LawViolation,
    assert_close,
    forward_no_grad,
    model_under_test,
    new_state,
    random_tokens,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.initialization import initialize, materialize
from heddle.model.load_config import parse_yaml
from heddle.model.size import size


def complete_initialization(config: ModelConfig) -> None:
    """A model whose parameters are allocated and then initialized holds no uninitialized value."""
    with torch.device("meta"):
        model = Decoder(config)
    materialize(model, torch.float32, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    initialize(model, seed=0)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise LawViolation(f"{name}: is on the meta device after the model was allocated")
        if not bool(tensor.isfinite().all()):
            raise LawViolation(f"{name}: is uninitialized")


def seeded_initialization(config: ModelConfig) -> None:
    """Initial weights depend on the seed alone, apart from rounding to the dtype; another seed gives different ones."""
    torch.rand(3)  # whatever was drawn before must not matter
    first = dict(build(config, seed=3).named_parameters())
    again = dict(build(config, seed=3).named_parameters())
    other_seed = dict(build(config, seed=4).named_parameters())
    wide = dict(build(config, dtype=torch.float64, seed=3).named_parameters())
    narrow = dict(build(config, dtype=torch.bfloat16, seed=3).named_parameters())
    for name, value in first.items():
        if not torch.equal(value, again[name]):
            raise LawViolation(f"{name}: differs between two builds with the same seed")
        if not torch.equal(wide[name].float(), value) or not torch.equal(value.to(narrow[name].dtype), narrow[name]):
            raise LawViolation(f"{name}: has different initial values in another dtype")
        spread = value.numel() > 1 and float(value.detach().std()) > 0  # constants are the same for every seed
        if spread and torch.equal(value, other_seed[name]):
            raise LawViolation(f"{name}: is the same for two seeds")
    by_shape: dict[tuple[int, ...], list[tuple[str, Tensor]]] = {}
    for name, value in first.items():
        for earlier, same in by_shape.setdefault(tuple(value.shape), []):
            if value.numel() > 1 and float(value.detach().std()) > 0 and torch.equal(value, same):
                raise LawViolation(f"{name}: has the same initial values as {earlier}")
        by_shape[tuple(value.shape)].append((name, value))


def tied_head(config: ModelConfig) -> None:
    """A tied head shares the embedding's weight, also after a change of dtype; an untied one does not."""
    for model in (build(config), build(config).to(torch.bfloat16)):
        tied = model.head.weight is model.embed.weight
        if tied != config.head.tied:
            raise LawViolation(
                f"the head {'shares' if tied else 'does not share'} the embedding's weight, "
                f"though tied is {config.head.tied}"
            )


def config_round_trip(config: ModelConfig) -> None:
    """A design written as JSON or YAML and read back is equal."""
    plain = config.dump()
    for name, data in (
        ("plain data", plain),
        ("JSON", json.loads(json.dumps(plain))),
        ("YAML", parse_yaml(yaml.safe_dump(plain), "the design")),
    ):
        again = parse_config(ModelConfig, data)
        if again != config:
            raise LawViolation(f"{name}: reads back as {again.dump()} instead of {plain}")


def state_dict_completeness(config: ModelConfig) -> None:
    """A state dict loaded into a model with another seed gives the same bits."""
    model = model_under_test(config)
    other = build(config, dtype=torch.float64, device=torch.get_default_device(), seed=5).eval()
    other.load_state_dict(model.state_dict())
    tokens = random_tokens(config, 2, 7)
    assert_close(
        forward_no_grad(other, tokens),
        forward_no_grad(model, tokens),
        "the same weights in another model",
        tolerance=0.0,
    )


def size_matches_model(config: ModelConfig) -> None:
    """The parameters and state bytes that `size` reports are those of the model that is built."""
    reported = size(config, context_length=21, batch=2, encoder_length=ENCODER_LENGTH)
    model = build(config, device=torch.get_default_device())
    parameters = sum({id(value): value.numel() for value in model.parameters()}.values())
    if reported.parameters != parameters:
        raise LawViolation(f"{reported.parameters} parameters are reported, {parameters} are built")
    if sum(layer.count for layer in reported.layers) != config.depth:
        raise LawViolation(f"the number of reported layers is not {config.depth}")
    if sum(layer.count for layer in reported.encoder) != (0 if config.encoder is None else config.encoder.depth):
        raise LawViolation("the reported layers of the encoder are not those of its design")
    allocated = new_state(model, 2, 21).bytes if model.causal else 0
    if reported.state_bytes != allocated:
        raise LawViolation(f"{reported.state_bytes} bytes of state are reported, {allocated} are allocated")
