"""Write benchmarks/results/transcript.md: one trained run, and how three programs continue its prompts.

    python tools/transcript.py RUN

RUN is a run of `heddle train` of a design that llama.cpp runs. The page is not written if the texts differ.
"""

import argparse
import sys
import tempfile
import textwrap
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402

import heddle  # noqa: E402
from heddle.exchange.export import export  # noqa: E402
from heddle.exchange.gguf import export_gguf  # noqa: E402
from heddle.exchange.imported_checkpoint import open_checkpoint  # noqa: E402
from tools.llama_cpp.runner import run, version  # noqa: E402

PAGE = ROOT / "benchmarks/results/transcript.md"
PROMPTS = ("def __init__(self", "    @property", "    while True:", "    def test_read(self", "    return ")
TOKENS = 64


class Transcript(NamedTuple):
    """What each program wrote after each prompt, and the largest difference of a next token's probability."""

    texts: dict[str, list[str]]
    differences: dict[str, float]


def main(run_folder: Path) -> None:
    """Write the page."""
    with tempfile.TemporaryDirectory() as folder:
        result = transcript(run_folder, Path(folder))
    for name, texts in result.texts.items():
        assert texts == result.texts["heddle"], f"{name} writes otherwise: {texts}"
    PAGE.write_text(page(result), encoding="utf-8")


def transcript(run_folder: Path, folder: Path) -> Transcript:
    """Greedy texts of a run in the three programs; `folder` receives the exports."""
    imported = open_checkpoint(run_folder)
    assert imported.tokenizer is not None, f"{run_folder}: has no tokenizer"
    export(imported.model, folder / "hf", imported.tokenizer, imported)
    export_gguf(imported.model, folder / "model.gguf", imported.tokenizer, imported)
    heddle_texts = heddle.generate(imported.model, PROMPTS, imported.tokenizer, max_new_tokens=TOKENS)
    hf_texts, probabilities = _transformers(folder / "hf")
    requests = [{"text": prompt, "n": TOKENS, "logits": True} for prompt in PROMPTS]
    answers = run(folder / "model.gguf", requests)
    differences = {"transformers": 0.0, "llama.cpp": 0.0}
    for answer, hf_probabilities in zip(answers, probabilities, strict=True):
        tokens = torch.tensor([answer["prompt"]])
        with torch.no_grad():
            heddle_probabilities = imported.model.head(imported.model(tokens)[0])[0].softmax(-1)
        for name, other_probabilities in (
            ("transformers", hf_probabilities),
            ("llama.cpp", torch.tensor(answer["logits"]).softmax(-1)),
        ):
            differences[name] = max(differences[name], float((heddle_probabilities - other_probabilities).abs().max()))
    return Transcript(
        {"heddle": heddle_texts, "transformers": hf_texts, "llama.cpp": [answer["text"] for answer in answers]},
        differences,
    )


def _transformers(folder: Path) -> tuple[list[str], list[torch.Tensor]]:
    """Texts, and probabilities after each token of each prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    texts: list[str] = []
    probabilities: list[torch.Tensor] = []
    for prompt in PROMPTS:
        read = tokenizer(prompt, return_tensors="pt")
        written = model.generate(**read, max_new_tokens=TOKENS, do_sample=False)
        texts.append(str(tokenizer.decode(written[0, read.input_ids.shape[1] :], skip_special_tokens=True)))
        with torch.no_grad():
            probabilities.append(model(**read).logits[0].softmax(-1))
    return texts, probabilities


def page(result: Transcript) -> str:
    """The page's text; all programs wrote the same."""
    versions = {
        "heddle": heddle.__version__,
        "transformers": metadata.version("transformers"),
        "llama.cpp": f"that of node-llama-cpp {version()}",
    }
    lines = [
        "# Three programs, one model",
        "",
        "<!-- Written by tools/transcript.py. -->",
        "",
        textwrap.fill(
            f"The model of [deploy](../../docs/deploy/README.md), greedy, {TOKENS} tokens after each prompt in fp32: "
            "all three programs write the same text, in which a `|` begins each line. The largest difference of any "
            "next token's probability, over all tokens of all prompts: heddle and "
            + ", heddle and ".join(f"{name} {value:.0e}" for name, value in result.differences.items())
            + ".",
            width=120,
        ),
        "",
        ", ".join(f"{name} {number}" for name, number in versions.items()) + ".",
    ]
    for prompt, text in zip(PROMPTS, result.texts["heddle"], strict=True):
        lines += ["", f"## `{prompt}`", "", "```text", *(f"| {line}".rstrip() for line in text.split("\n")), "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", type=Path)
    main(parser.parse_args().run)
