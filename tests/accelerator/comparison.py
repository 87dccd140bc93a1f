"""A design on the simulated GPU and on the CPU: the same weights, the same inputs, the same results."""

import copy
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from heddle.data.samples import Batch
from heddle.laws.harness import ENCODER_LENGTH, layout_for, new_state, probe_loss, random_tokens
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.parts.layout import Layout
from heddle.training.optimizer import build_optimizer
from heddle.training.step import StepNumbers, accumulate_gradients, apply_gradients
from tests.accelerator.pretend import DEVICE, moved, pretending, values_of

Results = dict[str, Tensor]

CPU = torch.device("cpu")
TOLERANCE = 1e-10  # of float64, relative to numbers above 1
LENGTH = 13
PROMPT = 7  # tokens read before single ones are decoded
KEY = (5, 7)


def model_of(config: ModelConfig, device: torch.device, dtype: torch.dtype = torch.float64) -> Decoder:
    """A model in eval mode; on every device it has the same weights."""
    model = copy.deepcopy(_built(config, dtype))
    return model if device == CPU else moved(model)


@lru_cache(maxsize=2)
def _built(config: ModelConfig, dtype: torch.dtype) -> Decoder:
    """Built once for all layouts and devices: drawing weights takes longer than a forward pass."""
    return build(config, dtype=dtype, device="cpu", seed=3).eval()


def layouts() -> dict[str, Callable[[], Layout]]:
    """Layouts of two rows of LENGTH columns on the default device."""
    return {
        "even": lambda: Layout.causal(2, LENGTH),
        "padded left": lambda: Layout.padded([LENGTH, 8]),
        "padded right": lambda: Layout.padded([8, LENGTH], side="right"),
        "packed": lambda: Layout.packed([[6, 7], [LENGTH]]),
    }


def forward_and_backward(model: Decoder, layout: Layout) -> Results:
    """Hidden states without padding, and the gradients of a loss, by name."""
    model.zero_grad(set_to_none=True)
    hidden, _ = model(random_tokens(model.config, 2, LENGTH), layout_for(model, 2, LENGTH, layout))
    is_token = None if layout.padding is None else ~layout.padding
    probe_loss(hidden, is_token).backward()
    hidden = hidden.detach() if is_token is None else hidden.detach().masked_fill(~is_token[..., None], 0.0)
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return {"hidden": hidden, **gradients}


def decoded(model: Decoder) -> Results:
    """Hidden states of a prompt and of three single tokens read with a state."""
    tokens = random_tokens(model.config, 2, PROMPT + 3)
    state = new_state(model, 2, PROMPT + 3)
    results: Results = {}
    with torch.no_grad():
        for name, part in (("prompt", tokens[:, :PROMPT]), *((f"token {n}", tokens[:, n : n + 1]) for n in (7, 8, 9))):
            results[name], state = model(part, None, state)
    return results


def batch_of(config: ModelConfig, has_labels: bool) -> Batch:
    """Two rows for a training step; with labels, some of them are ignored."""
    draw = np.random.default_rng(0)
    assert config.vocab_size is not None
    tokens = draw.integers(1, config.vocab_size, (2, LENGTH + 1))
    labels = np.where(draw.random((2, LENGTH)) < 0.5, -1, tokens[:, 1:]) if has_labels else None
    encoder_tokens = None
    if config.encoder is not None:
        encoder_tokens = draw.integers(1, config.encoder.vocab_size or config.vocab_size, (2, ENCODER_LENGTH))
        encoder_tokens[1, 3:] = -1
    return Batch(tokens, ((6, 7), (LENGTH,)), np.arange(2), encoder_tokens, labels)


class Step:
    """A training step on a device. `take` queues it, `read` waits for its numbers."""

    def __init__(self, config: ModelConfig, device: torch.device, autocast: torch.dtype | None = None) -> None:
        dtype = torch.float64 if autocast is None else torch.float32
        self.model, self.autocast = model_of(config, device, dtype).train(), autocast
        self.optimizer = build_optimizer(self.model, 0.1)
        self.batch = batch_of(config, has_labels=config.encoder is None)

    def take(self, accumulation_steps: int = 2) -> None:
        """Queue a step."""
        gradients = accumulate_gradients(self.model, self.batch, KEY, accumulation_steps, self.autocast)
        self.result = apply_gradients(self.model, self.optimizer, gradients, 1e-3, 1.0)

    def read(self) -> StepNumbers:
        """The numbers of the step."""
        return self.result.read()

    def weights(self) -> Results:
        """The parameters and buffers."""
        return {name: value.detach() for name, value in self.model.state_dict().items()}


def has_training_step(config: ModelConfig) -> bool:
    """Whether a batch has all that the design reads: not the encoder output of a design without an encoder."""
    return config.encoder is not None or model_of(config, torch.device("meta")).encoder_width is None


def differences(got: Results, want: Results) -> list[str]:
    """The names of tensors that differ, with the largest difference."""
    faults = [f"{name}: only on one device" for name in got.keys() ^ want.keys()]
    for name in got.keys() & want.keys():
        values = values_of(got[name])
        bound = TOLERANCE * max(1.0, float(want[name].double().abs().nan_to_num(posinf=0.0).max()))
        worst = float((values.double() - want[name].double()).abs().nan_to_num(nan=torch.inf).max())
        if worst > bound:
            faults.append(f"{name}: differs by {worst:.1e}")
    return sorted(faults)


def faults_of(config: ModelConfig) -> list[str]:
    """What differs between the two devices in every layout, in decoding and in a training step, and every wait."""
    on_cpu = model_of(config, CPU)
    want = {name: forward_and_backward(on_cpu, make()) for name, make in layouts().items()}
    want["decoding"] = decoded(on_cpu) if on_cpu.causal else {}
    got: dict[str, Results] = {}
    faults: list[str] = []
    with pretending() as log, DEVICE:
        model = model_of(config, DEVICE)
        for name, make in layouts().items():
            log.clear()
            got[name] = forward_and_backward(model, make())
            faults += [f"{name}: {wait}" for wait in log.report if " at laws/" not in wait]  # those of the inputs
        got["decoding"] = decoded(model) if on_cpu.causal else {}
    faults += [f"{name}: {fault}" for name in want for fault in differences(got[name], want[name])]
    if has_training_step(config):
        faults += [f"step: {fault}" for fault in step_faults(config)]
    return faults


def step_faults(config: ModelConfig) -> list[str]:
    """What differs between the two devices after a training step, and every wait but the one that reads it."""
    cpu = Step(config, CPU)
    cpu.take()
    with pretending() as log:
        step = Step(config, DEVICE)
        log.clear()
        step.take()
        waits = log.report
        log.clear()
        numbers = step.read()
    if [wait.what for wait in log.waits] != ["event"]:
        waits += [f"{wait} as its numbers are read" for wait in log.report]
    want = cpu.read()
    if numbers.experts != want.experts or abs(numbers.loss - want.loss) > TOLERANCE or numbers.skipped:
        waits.append(f"{numbers} instead of {want}")
    return [*differences(step.weights(), cpu.weights()), *waits]
