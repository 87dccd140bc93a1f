"""Distillation: train a model to match another one, its teacher, on the same tokens.

    loss = w_logits · KL(p_teacher ‖ p) + w_text · CE(p) + w_layers · mean_l ‖layer_l(x_l) − x_{l+1}‖² / elements

KL and cross-entropy are means over targets, at temperature 1 (Hinton et al. 2015, https://arxiv.org/abs/1503.02531).
x_l is the input of the teacher's layer l, so each layer is trained alone, on the right input, and errors of earlier
layers do not reach it (MOHAWK's second stage, Bick et al. 2024, https://arxiv.org/abs/2408.10189). The mean is over
tokens, and over the layers that differ from the teacher's before the first step.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from heddle.model.copies import compiled
from heddle.model.decoder import Decoder
from heddle.numerics.cross_entropy import DistillationSums, OutputHead, TeacherOutput, distillation_sums
from heddle.numerics.norms import at_least_float32
from heddle.parts.layout import Layout
from heddle.tokenization.tokenizer import Tokenizer

TRAINED_PARAMETERS = ("all", "touched")


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """The weights of the three losses. logits: KL from the teacher. text: cross-entropy. layers: layer outputs."""

    logits: float = 1.0
    text: float = 0.0
    layers: float = 0.0

    def __post_init__(self) -> None:
        for name, weight in asdict(self).items():
            if not 0.0 <= weight < float("inf"):
                raise ConfigError(f"loss {name}={weight:g}: the weight must be a number of at least 0")
        if not any(asdict(self).values()):
            raise ConfigError("loss: every weight is 0, so nothing would be trained; set one above 0")

    @classmethod
    def parse(cls, text: str | None, option: str) -> "LossWeights":
        """Parse `logits=0.9,text=0.1`; a name alone has weight 1, None gives the default. Raises ConfigError."""
        if text is None:
            return cls()
        weights = {"logits": 0.0, "text": 0.0, "layers": 0.0}
        for term in text.split(","):
            name, equals, number = term.strip().partition("=")
            if name not in weights:
                raise ConfigError(f"{option} {text}: unknown loss '{name}'; choices: {', '.join(weights)}")
            try:
                weights[name] = float(number) if equals else 1.0
            except ValueError:
                raise ConfigError(f"{option} {text}: the weight of {name} must be a number of at least 0") from None
        return cls(**weights)


class TeacherSource(Protocol):
    """A saved model that can teach, such as an `InitCheckpoint`."""

    @property
    def folder(self) -> Path:
        """Return the folder it was read from."""

    @property
    def config(self) -> ModelConfig:
        """Return its design."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Return its tokenizer, None if it has none."""

    @property
    def weights_sha256(self) -> str:
        """Return the SHA-256 of all weights."""

    def build_model(self, config: ModelConfig, device: str) -> Decoder:
        """Build its design with its weights, in float32."""


@dataclass(frozen=True)
class Distillation:
    """A teacher and how to learn from it.

    parameters: 'all' trains every weight; 'touched' only weights that differ from the teacher's, in shape or value,
    before the first step, and all weights of a mixer or feed-forward with such a weight or another design.
    """

    teacher: TeacherSource
    weights: LossWeights = LossWeights()
    parameters: str = "all"

    def __post_init__(self) -> None:
        if self.parameters not in TRAINED_PARAMETERS:
            choices = ", ".join(TRAINED_PARAMETERS)
            raise ConfigError(f"parameters {self.parameters}: unknown parameters; choices: {choices}")

    def identity(self) -> dict[str, Any]:
        """Return what two runs must share to be the same run."""
        return {"teacher": self.teacher.weights_sha256, "weights": asdict(self.weights), "parameters": self.parameters}

    def build_teacher(
        self, model: Decoder, tokenizer: Tokenizer | None, device: str, compile_layers: bool = False
    ) -> "Teacher | None":
        """Build the teacher of `model` before the first step, and freeze the parameters that are not trained.

        tokenizer: the data's, None for data without one. Returns None if only the text loss has a weight. Raises
        ConfigError if the two models do not fit together.
        """
        teacher = self.teacher.build_model(self.teacher.config, device)
        reads_teacher = self.weights.logits > 0.0 or self.weights.layers > 0.0
        if reads_teacher:
            self._check_fit(model, teacher, tokenizer)
        touched = _touched_parameters(model, teacher)
        if self.parameters == "touched":
            if not touched:
                raise ConfigError(f"parameters touched: the model equals {self._folder}; train all")
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and name in touched)
        if not reads_teacher:
            return None
        layers = self._converted_layers(model, teacher, touched) if self.weights.layers else ()
        return Teacher(compiled(teacher) if compile_layers and not layers else teacher, self.weights, layers)

    @property
    def _folder(self) -> Path:
        return self.teacher.folder

    def _check_fit(self, model: Decoder, teacher: Decoder, tokenizer: Tokenizer | None) -> None:
        vocab_size, teacher_vocab_size = (decoder.embed.weight.shape[0] for decoder in (model, teacher))
        if vocab_size != teacher_vocab_size:
            sizes = f"its vocabulary has {teacher_vocab_size} tokens, the model's {vocab_size}"
            raise ConfigError(f"{self._folder}: {sizes}; a teacher needs the same vocabulary")
        teacher_tokenizer = self.teacher.tokenizer
        if tokenizer is not None and (
            teacher_tokenizer is None or teacher_tokenizer.to_files() != tokenizer.to_files()
        ):
            raise ConfigError(f"{self._folder}: its tokenizer differs from the data's; a teacher needs the same")
        if teacher.encoder_width is not None:
            raise ConfigError(f"{self._folder}: reads an encoder output, and this data has none; take another teacher")

    def _converted_layers(self, model: Decoder, teacher: Decoder, touched: frozenset[str]) -> tuple[int, ...]:
        """Return the layers that have a touched parameter. Raises ConfigError where layers do not correspond."""
        for field in ("depth", "width", "residual"):
            if getattr(model.config, field) != getattr(teacher.config, field):
                raise ConfigError(f"loss layers: {field} differs from {self._folder}; compare logits instead")
        if model.config.embedding.per_layer is not None or model.config.reads_tokens:
            reads = "ids of tokens" if model.config.reads_tokens else "per-layer embeddings"
            raise ConfigError(f"loss layers: layers that read {reads} cannot run alone; compare logits instead")
        if model.config.hands_over:
            raise ConfigError("loss layers: layers that read other layers cannot run alone; compare logits instead")
        if model.config.is_looped:
            raise ConfigError("loss layers: a shared layer has different inputs at each pass; compare logits instead")
        layers = {int(name.split(".")[1]) for name in touched if name.startswith("layers.")}
        if not layers:
            raise ConfigError(f"loss layers: all layers equal the layers of {self._folder}; compare logits instead")
        return tuple(sorted(layers))


def _touched_parameters(model: Decoder, original: Decoder) -> frozenset[str]:
    """Return the names of the parameters that a conversion of `original` to `model` touched."""
    before, after = dict(original.named_parameters()), dict(model.named_parameters())
    differing = {name for name, x in after.items() if name not in before or not torch.equal(x, before[name])}
    branches = {_branch(name) for name in differing if name.startswith("layers.")} | _converted_branches(
        model, original
    )
    return frozenset(differing | {name for name in after if _branch(name) in branches})


def _branch(name: str) -> str:
    """`layers.3.mixer.q.weight` -> `layers.3.mixer`."""
    return ".".join(name.split(".")[:3])


def _converted_branches(model: Decoder, original: Decoder) -> set[str]:
    """Return the paths of the mixers and feed-forwards whose design differs; a window changes no weight."""
    layers = [[layer for _, layer in decoder.config.resolved().expand()] for decoder in (model, original)]
    return {
        f"layers.{index}.{branch}"
        for index, (now, then) in enumerate(zip(*layers, strict=False))
        for branch in ("mixer", "feedforward")
        if getattr(now, branch) != getattr(then, branch)
    }


class LayerPair(NamedTuple):
    """The input `stream`, the layout and the output `new_stream` of the teacher's layer `layer_index`."""

    layer_index: int
    stream: Any
    layout: Layout
    new_stream: Any


class TeacherResult(NamedTuple):
    """What a teacher computes for a micro-batch.

    hidden: [B, T, width] of the teacher. layer_error: float64 [], the layer loss without its weight; its gradients are
    already in the model's parameters.
    """

    teacher: "Teacher"
    hidden: Tensor
    layer_error: Tensor

    def sums(self, hidden: Tensor, head: OutputHead, targets: Tensor, index: Tensor | slice) -> DistillationSums:
        """Return the sums of the losses over targets [N], from a model's hidden states [N, width].

        index: selects these N of the B · T positions.
        """
        weights = self.teacher.weights
        output = TeacherOutput(self.hidden.flatten(0, 1)[index], self.teacher.model.head.output_head)
        return distillation_sums(hidden, head, targets, output, weights.text, weights.logits)


class Teacher:
    """A frozen model in evaluation mode, with the weights of the losses and the layers to compare."""

    def __init__(self, model: Decoder, weights: LossWeights, layers: Sequence[int] = ()) -> None:
        self.model, self.weights, self.layers = model.eval().requires_grad_(False), weights, tuple(layers)

    def share_frozen(self, model: Decoder) -> None:
        """Read the weights that the model has, too, and does not train from its memory."""
        own = dict(self.model.named_parameters())
        for name, parameter in model.named_parameters():
            twin = own.get(name)
            if twin is None or parameter.requires_grad or twin.dtype != parameter.dtype:
                continue
            if torch.equal(twin, parameter):
                twin.data = parameter.data

    @property
    def uses_head(self) -> bool:
        """Return whether gradients reach the model through its head; False if only layers are compared."""
        return bool(self.weights.logits or self.weights.text)

    def read(self, model: Decoder, tokens: Tensor, layout: Layout, tokens_in_batch: int) -> TeacherResult:
        """Run the teacher on tokens int64 [B, T], and add the layer loss's gradients to the parameters of `model`.

        tokens_in_batch: how many tokens the layer loss is a mean over.
        """
        pairs: list[LayerPair] = []
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for index in self.layers:
                hook = self.model.layers[index].register_forward_hook(_recorder(index, pairs))
                stack.callback(hook.remove)
            hidden, _ = self.model(tokens, layout)
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        for pair in pairs:  # each layer's graph is freed before the next layer runs
            new_stream, _ = model.layers[pair.layer_index](pair.stream, pair.layout)
            error = _squared_error(new_stream, pair.new_stream, pair.layout.padding)
            error = error / (tokens_in_batch * len(self.layers))
            if error.requires_grad:
                with torch.autocast(error.device.type, enabled=False):  # a backward pass must not cast again
                    torch.autograd.backward(self.weights.layers * error)
            total += error.detach().double()
        return TeacherResult(self, hidden, total)


def _recorder(index: int, pairs: list[LayerPair]) -> Callable[..., None]:
    def record(module: nn.Module, arguments: tuple[Any, ...], output: tuple[Any, Any]) -> None:
        pairs.append(LayerPair(index, arguments[0], arguments[1], output[0]))

    return record


def _squared_error(stream: Any, target: Any, padding: Tensor | None) -> Tensor:
    """Return the sum over tokens of the mean squared difference of two streams: a tensor [B, T, ...], or several."""
    streams, targets = ((x,) if isinstance(x, Tensor) else tuple(x) for x in (stream, target))
    differences = [(a - b).flatten(2) for a, b in zip(streams, targets, strict=True)]
    squares = at_least_float32(torch.cat(differences, -1)).square().mean(-1)
    return (squares if padding is None else squares.masked_fill(padding, 0.0)).sum()
