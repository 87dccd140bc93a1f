"""ONNX Runtime: a softmax design of a family with its cache, token for token, and the logits of our own decoder."""

from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

import heddle
from tests.clients.folders import DESIGNS, folder_of, run_client

States = list[tuple[Tensor, Tensor]]
FREE: Any = Dim.DYNAMIC
STEPS = 12


class WithCache(nn.Module):
    """The model with its keys and values as inputs and outputs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past: States) -> tuple[Tensor, States]:
        """Logits, and the longer states."""
        cache = DynamicCache()
        for i, (keys, values) in enumerate(past):
            cache.update(keys, values, i)
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
        return outputs.logits, [(layer.keys, layer.values) for layer in outputs.past_key_values.layers]


class Logits(nn.Module):
    """heddle's own decoder with its head."""

    def __init__(self, decoder: heddle.Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> logits [B, T, vocab]."""
        logits: Tensor = self.decoder.head(self.decoder(tokens)[0])
        return logits


def run(session: Any, tensors: list[Tensor]) -> list[Tensor]:
    """One call of ONNX Runtime."""
    names = [item.name for item in session.get_inputs()]
    feed = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
    return [torch.from_numpy(output) for output in session.run(None, feed)]


def check_text(folder: Path, work: Path) -> str:
    """Greedy text of ONNX Runtime, one token a call, is that of transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    config = model.config
    shape = (config.num_key_value_heads, 4, model.model.layers[0].self_attn.head_dim)
    past = [(torch.randn(2, *shape), torch.randn(2, *shape)) for _ in range(config.num_hidden_layers)]
    inputs = (torch.tensor([[5, 6, 7], [8, 9, 10]]), torch.ones(2, 7, dtype=torch.int64), past)
    states = [({0: FREE, 2: FREE}, {0: FREE, 2: FREE})] * len(past)
    shapes = ({0: FREE, 1: FREE}, {0: FREE, 1: FREE}, states)
    program = torch.onnx.export(WithCache(model), inputs, dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    program.save(str(work / "cache.onnx"))
    session = onnxruntime.InferenceSession(str(work / "cache.onnx"))
    prompt = torch.tensor([[5, 6, 7, 8, 9]])
    arguments = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": None, "output_logits": True}
    expected = model.generate(prompt, return_dict_in_generate=True, **arguments)
    flat = [torch.zeros(1, shape[0], 0, shape[2]) for _ in range(2 * len(past))]
    tokens, written, difference = prompt, [], 0.0
    for step in range(STEPS):
        mask = torch.ones(1, flat[0].shape[2] + tokens.shape[1], dtype=torch.int64)
        logits, *flat = run(session, [tokens, mask, *flat])
        difference = max(difference, float((logits[0, -1] - expected.logits[step][0]).abs().max()))
        written.append(int(logits[0, -1].argmax()))
        tokens = torch.tensor([written[-1:]])
    assert written == expected.sequences[0, 5:].tolist()
    assert len(set(written)) > 1
    assert difference < 1e-4
    return f"{STEPS} tokens with a cache equal, logits differ by {difference:.1e}"


def check_decoder(work: Path) -> str:
    """heddle's own decoder with another batch and length."""
    name, *overrides = DESIGNS["llama"]
    logits = Logits(heddle.build(heddle.load_config(name, overrides=[*overrides, "vocab_size=300"])).eval())
    shapes = ({0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=4096)},)
    zeros = torch.zeros(2, 16, dtype=torch.int64)
    program = torch.onnx.export(logits, (zeros,), dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    program.save(str(work / "own.onnx"))
    tokens = torch.randint(300, (3, 37), generator=torch.Generator().manual_seed(1))
    (output,) = run(onnxruntime.InferenceSession(str(work / "own.onnx")), [tokens])
    difference = float((output - logits(tokens)).abs().max())
    assert difference < 1e-5
    return f"logits of the decoder itself differ by {difference:.1e}"


def main(work: Path) -> str:
    """Both."""
    folder = folder_of("llama", work, steps=60)
    with torch.no_grad():
        return "; ".join([check_text(folder, work), check_decoder(work)])


if __name__ == "__main__":
    run_client(main, "onnxruntime", "onnx", "onnxscript")
