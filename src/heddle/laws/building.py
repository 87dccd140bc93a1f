"""Building, writing and sizing: a design and its weights are all there is to a model."""

import json

import torch
import yaml
from torch import Tensor

from heddle.config import decode
from heddle.laws.subject import MEMORY, Broken, answer, equal, fresh, subject, text
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build, initialise, materialise
from heddle.model.load_config import parse_yaml
from heddle.model.size import size


def nothing_unset(config: ModelConfig) -> None:
    """A model built without memory and then filled holds nothing unset: every parameter says how it starts."""
    with torch.device("meta"):
        model = Decoder(config)
    materialise(model, torch.float32, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    initialise(model, seed=0)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise Broken(f"{name}: has no memory after the model was given some")
        if not bool(tensor.isfinite().all()):
            raise Broken(f"{name}: is unset after initialisation")


def seeds(config: ModelConfig) -> None:
    """The start is a function of the seed: the same twice, another for another seed, in any dtype but rounding."""
    torch.rand(3)  # whatever was drawn before must not matter
    first = dict(build(config, seed=3).named_parameters())
    again = dict(build(config, seed=3).named_parameters())
    other = dict(build(config, seed=4).named_parameters())
    wide = dict(build(config, dtype=torch.float64, seed=3).named_parameters())
    narrow = dict(build(config, dtype=torch.bfloat16, seed=3).named_parameters())
    for name, value in first.items():
        if not torch.equal(value, again[name]):
            raise Broken(f"{name}: differs between two builds with one seed")
        if not torch.equal(wide[name].float(), value) or not torch.equal(value.to(narrow[name].dtype), narrow[name]):
            raise Broken(f"{name}: starts otherwise in another dtype")
        spread = value.numel() > 1 and float(value.detach().std()) > 0  # constants are the same for every seed
        if spread and torch.equal(value, other[name]):
            raise Broken(f"{name}: is the same for two seeds")
    drawn: dict[tuple[int, ...], list[tuple[str, Tensor]]] = {}
    for name, value in first.items():
        for earlier, same in drawn.setdefault(tuple(value.shape), []):
            if value.numel() > 1 and float(value.detach().std()) > 0 and torch.equal(value, same):
                raise Broken(f"{name}: starts with the numbers of {earlier}")
        drawn[tuple(value.shape)].append((name, value))


def tied_head(config: ModelConfig) -> None:
    """A tied head is the embedding, also after a change of dtype; an untied one is its own."""
    for model in (build(config), build(config).to(torch.bfloat16)):
        tied = model.head.weight is model.embed.weight
        if tied != config.head.tied:
            raise Broken(
                f"the head is {'' if tied else 'not '}the embedding's weight, though tied is {config.head.tied}"
            )


def round_trip(config: ModelConfig) -> None:
    """A design written as JSON or YAML and read back is the same design."""
    plain = config.dump()
    for name, data in (
        ("plain data", plain),
        ("JSON", json.loads(json.dumps(plain))),
        ("YAML", parse_yaml(yaml.safe_dump(plain), "the design")),
    ):
        again = decode(ModelConfig, data)
        if again != config:
            raise Broken(f"{name}: reads back as {again.dump()} instead of {plain}")


def weights_are_all(config: ModelConfig) -> None:
    """Weights put into a model of another seed give the same bits: nothing lives outside of them."""
    model = subject(config)
    other = build(config, dtype=torch.float64, seed=5).eval()
    other.load_state_dict(model.state_dict())
    tokens = text(config, 2, 7)
    equal(answer(other, tokens), answer(model, tokens), "the same weights in another model", tolerance=0.0)


def true_size(config: ModelConfig) -> None:
    """The parameters and state bytes that are told are those of the model that is built."""
    told = size(config, context=21, batch=2, memory=MEMORY)
    model = build(config)
    parameters = sum({id(value): value.numel() for value in model.parameters()}.values())
    if told.parameters != parameters:
        raise Broken(f"{told.parameters} parameters are told, {parameters} are built")
    if sum(layer.count for layer in told.layers) != config.depth:
        raise Broken(f"the layers told are not {config.depth}")
    if sum(layer.count for layer in told.encoder) != (0 if config.encoder is None else config.encoder.depth):
        raise Broken("the layers told of the encoder are not those of its design")
    kept = fresh(model, 2, 21).bytes if model.causal else 0
    if told.state_bytes != kept:
        raise Broken(f"{told.state_bytes} bytes of state are told, {kept} are allocated")
