"""torchao's int8 weights and bitsandbytes' 4 bits; torch's `quantize_dynamic`, which leaves our class as it is."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from bitsandbytes import functional as bnb
from safetensors.torch import load_file, save_file
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import AutoModelForCausalLM

from heddle.exchange.load import load
from tests.clients.folders import folder_of, run_client

TOKENS = torch.tensor([[5, 6, 7, 8]])


def check_int8(folder: Path) -> str:
    """All linear maps but the head are int8, the logits move a little, and text is written."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        before = model(TOKENS).logits
        quantize_(model, Int8WeightOnlyConfig())
        difference = float((model(TOKENS).logits - before).abs().max() / before.abs().max())
    count = sum(type(parameter).__name__ == "Int8Tensor" for parameter in model.parameters())
    assert count >= 14
    assert 0 < difference < 0.05
    assert model.generate(TOKENS, max_new_tokens=6, do_sample=False).shape[1] > TOKENS.shape[1]
    return f"torchao int8 {folder.name}: {count} weights, logits differ by {difference:.1%}"


def check_dynamic(folder: Path) -> str:
    """`quantize_dynamic` replaces modules whose type is nn.Linear itself; heddle's is a subclass."""
    replaced = torch.ao.quantization.quantize_dynamic(
        AutoModelForCausalLM.from_pretrained(folder).eval(), {torch.nn.Linear}, dtype=torch.qint8
    )
    assert not any("quantized" in type(module).__module__ for module in replaced.modules())
    return "quantize_dynamic replaces nothing"


def packed(weight: torch.Tensor, kind: str, double: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors that bitsandbytes stores, and the weight that it unpacks from them."""
    numbers, state = bnb.quantize_4bit(weight, quant_type=kind, compress_statistics=double, blocksize=64)
    stored = {f".{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    return {"": numbers} | stored, bnb.dequantize_4bit(numbers, state)


def check_4bit(folder: Path, kind: str, double: bool) -> str:
    """Rows of whole blocks: heddle's import has the library's own numbers, rounded to its type."""
    (file,) = folder.glob("*.safetensors")
    originals, config = load_file(file), json.loads((folder / "config.json").read_text())
    tensors, expected = {}, {}
    for name, tensor in originals.items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        stored, expected[name] = packed(tensor, kind, double)
        tensors |= {name + suffix: part for suffix, part in stored.items()}
    fields: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    save_file(tensors, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))
    unpacked = load(folder, dequantize=torch.float32).model
    save_file(originals | expected, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    want = load(folder).model
    for name, parameter in want.named_parameters():
        assert torch.equal(unpacked.get_parameter(name), parameter), name
    save_file(originals, file, metadata={"format": "pt"})
    return f"{kind}{' double' if double else ''}: {len(expected)} weights equal"


def main(work: Path) -> str:
    """All of them."""
    warnings.simplefilter("ignore")
    wide = folder_of("llama", work, overrides=("width=64", "layers.0.feedforward.hidden=128"))
    native, ours = folder_of("llama", work, seed=2), folder_of("gated_delta", work)
    said = [check_4bit(wide, kind, double) for kind in ("nf4", "fp4") for double in (False, True)]
    return "; ".join([check_int8(native), check_int8(ours), check_dynamic(ours), *said])


if __name__ == "__main__":
    run_client(main, "torchao", "bitsandbytes")
