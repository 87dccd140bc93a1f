"""One small model of each newer mechanism: trained, saved, loaded, generated with its cache, run in transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import heddle
from heddle.cli.main import run_command
from heddle.exchange.family import families
from heddle.exchange.family_match import design_from_config
from heddle.exchange.transformers import export, load
from heddle.storage.run_log import read_log
from tests import small
from tests.cases import CASES
from tests.clients.folders import run_client
from tests.exchange.hf_models import config_of

STEPS, NEW_TOKENS, VOCABULARY = 200, 24, 300
OPTIONS = [
    "--vocab-size", str(VOCABULARY), "--batch-size", "8", "--sequence-length", "64", "--lr", "0.01", "--device", "cpu",
    "--threads", "1", "--quiet",
]  # fmt: skip
PROMPT = "The weaver lifts"


def family_design(family: str) -> dict[str, Any]:
    """The design of a small model of a family."""
    config = json.loads(config_of(family, "plain", vocab_size=VOCABULARY).to_json_string())
    return design_from_config(config, families()[family]).dump()


def designs() -> dict[str, dict[str, Any]]:
    """A design of each mechanism: one that a family holds, where there is a family."""
    return {
        "indexer": family_design("deepseek_v32"),
        "compressed attention and experts by a table": family_design("deepseek_v4"),
        "Mamba": family_design("jamba"),
        "multi-token prediction": family_design("deepseek_v3") | {"multi_token": {"depth": 1, "loss_weight": 0.3}},
        "negative eigenvalues": family_design("olmo_hybrid"),
        "shared keys": CASES["attention-shared-keys"],
        "attention residuals": CASES["residual-attention-blocks"],
        "looped layers": CASES["shared-layer"],
        "short convolutions": CASES["short-convolution"],
        "value residual": CASES["attention-value-residual"],
        "RWKV-7": CASES["rwkv7"],
    }


@torch.no_grad()
def without_cache(model: Any, prompt: list[int]) -> tuple[list[int], Tensor]:
    """The greedy continuation, all of the text read anew for each token, and the logits [T, vocab] of the text."""
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        tokens.append(int(logits_of(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :], logits_of(model, tokens)


def logits_of(model: Any, tokens: list[int]) -> Tensor:
    """tokens -> logits [T, vocab], by heddle or by transformers."""
    rows = torch.tensor([tokens])
    if isinstance(model, heddle.Decoder):
        logits: Tensor = model.head(model(rows)[0])[0]
        return logits
    theirs: Tensor = model(rows, use_cache=False).logits[0]
    return theirs


def train(design: dict[str, Any], work: Path) -> Path:
    """A run of a design, by the command line."""
    fields = {name: value for name, value in design.items() if name != "vocab_size"}
    file, run = work / "design.yaml", work / "run"
    file.write_text(json.dumps(fields), encoding="utf-8")
    command = ["train", str(file), "--data", str(small.folder(work / "text")), "--out", str(run), *OPTIONS]
    assert run_command([*command, "--steps", str(STEPS)]) == 0
    losses = [line["loss"] for line in read_log(run) if "loss" in line]
    assert losses[-1] < 0.5 * losses[0], losses
    return run


def check(name: str, design: dict[str, Any], work: Path) -> str:
    """Train, save and load a model, generate with its cache, export it, and run it in transformers."""
    model, tokenizer = heddle.load(train(design, work))
    assert tokenizer is not None
    heddle.save(model, work / "saved", tokenizer)
    again, _ = heddle.load(work / "saved")
    prompt = tokenizer.encode(PROMPT)
    want, logits = without_cache(model.eval(), prompt)
    assert len(set(want)) > 4, want
    for each in (model, again):
        assert heddle.generate(each, prompt, max_new_tokens=NEW_TOKENS) == want, name
    if design.get("multi_token"):
        assert heddle.generate(again, prompt, max_new_tokens=NEW_TOKENS, multi_token_draft=True) == want
    match = export(again, work / "export", tokenizer)
    theirs = AutoModelForCausalLM.from_pretrained(work / "export", experts_implementation="eager").eval()
    text = prompt + want
    difference = float((logits_of(theirs, text) - logits).detach().abs().max())
    assert difference < 1e-4, (name, difference)
    asked = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert theirs.generate(torch.tensor([prompt]), **asked)[0].tolist() == text, name
    back, _ = load(work / "export")
    for parameter_name, parameter in back.named_parameters():
        assert torch.equal(parameter, model.get_parameter(parameter_name)), parameter_name
    return f"{name} as {match.architecture}, logits {difference:.0e}"


def main(work: Path) -> str:
    """Each mechanism."""
    said = []
    for name, design in designs().items():
        (work / name).mkdir()
        said.append(check(name, design, work / name))
        print(said[-1], flush=True)
    return f"{NEW_TOKENS} tokens with a cache equal, of " + "; ".join(said)


if __name__ == "__main__":
    run_client(main, "transformers")
