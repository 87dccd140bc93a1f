"""What the scripts of clients share: folders of small exported models, and how a script runs."""

import argparse
import importlib.metadata
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"}
warnings.simplefilter("ignore")  # what clients say is not ours

import torch  # noqa: E402
from torch.nn import functional  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

import heddle  # noqa: E402
from heddle.exchange.transformers import export  # noqa: E402
from heddle.storage.manifest import MANIFEST_FILE  # noqa: E402
from tests import small  # noqa: E402

TEXTS = [f"The weaver lifts a thread and throws the shuttle {number} times." for number in range(32)]
TEMPLATE = "{% for said in messages %}{{ said.role }}: {{ said.content }}\n{% endfor %}"
DESIGNS = {
    "llama": ["preset:gqa-tiny", "width=48", "layers.0.repeat=2"],
    "encoder": ["preset:gqa-tiny", "width=48", "layers.0.repeat=2", "layers.0.mixer.causal=false"],
    "gated_delta": ["preset:hybrid-tiny", "width=48"],
}
COMMON: dict[str, Any] = {
    "max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1, "use_cpu": True, "report_to": [],
    "bf16": False, "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-2,
}  # fmt: skip


def train(model: heddle.Decoder, tokenizer: Any, steps: int) -> None:
    """Learn the first tokens of TEXTS by heart, so that text is text."""
    rows = torch.tensor([[tokenizer.eod_id, *tokenizer.encode(text)][:24] for text in TEXTS[:8]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        logits = model.head(model(rows[:, :-1])[0])
        functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def folder_of(
    kind: str, work: Path, pad: bool = False, seed: int = 1, steps: int = 0, overrides: Sequence[str] = ()
) -> Path:
    """Export a small model of a kind with a tokenizer, after some steps of training on TEXTS.

    pad: with a padding token, and a template for chats.
    """
    texts = small.corpus(work / f"text-{kind}-{seed}")
    name, *changes = DESIGNS[kind]
    changes += [f"vocab_size={texts.tokenizer.vocab_size}", *overrides]
    model = heddle.build(heddle.load_config(name, overrides=changes), seed=seed).eval()
    train(model, texts.tokenizer, steps)
    folder = work / f"{kind}-{seed}"
    export(model, folder, texts.tokenizer)
    (folder / MANIFEST_FILE).unlink()  # clients change files
    if pad:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.pad_token = tokenizer.decode([0])
        if kind != "encoder":  # sentence-transformers makes a chat of each text if there is a template
            tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder)
    return folder


def run_client(main: Callable[[Path], str], *packages: str) -> None:
    """Run a script in a folder of its own, and print the versions of its packages and what it says."""
    argparse.ArgumentParser(description=sys.modules["__main__"].__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="heddle-client-") as folder:
        said = main(Path(folder))
    versions = " ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    print(f"{versions}: {said}")
    sys.stdout.flush()
