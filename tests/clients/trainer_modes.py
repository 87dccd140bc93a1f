"""Trainer compiled and with two processes: the losses of one process that is not compiled. PEFT: LoRA, DoRA, merged."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from tests.clients.folders import COMMON, folder_of, run_client

STEPS = 5


def rows(count: int = 64) -> list[dict[str, list[int]]]:
    """Rows of one length."""
    draw = torch.Generator().manual_seed(4)
    drawn = torch.randint(1, 299, (count, 16), generator=draw).tolist()
    return [{"input_ids": tokens, "labels": tokens} for tokens in drawn]


def train(folder: Path, out: Path, **changes: Any) -> list[float]:
    """The losses of a training."""
    arguments = TrainingArguments(output_dir=str(out), **COMMON | {"max_steps": STEPS, "seed": 3} | changes)
    trainer = Trainer(AutoModelForCausalLM.from_pretrained(folder), arguments, train_dataset=rows())
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def check_same(name: str, losses: list[float], expected: list[float], bound: float) -> str:
    """The losses differ by less than `bound`."""
    difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    assert difference < bound, f"{name}: {losses} instead of {expected}"
    assert losses[-1] < losses[0]
    return f"{name} differs by {difference:.1e}"


def in_two_processes(folder: Path, out: Path) -> list[float]:
    """The losses of the same rows in each batch, split over two processes by torchrun."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    subprocess.run([*launch, "-m", "tests.clients.trainer_modes", str(folder), str(out)], check=True)
    losses: list[float] = json.loads((out / "losses.json").read_text())
    return losses


def check_adapters(folder: Path, **fields: Any) -> str:
    """Only the adapters learn, and the merged model gives the same logits."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder), LoraConfig(r=2, target_modules="all-linear", **fields)
    )
    tokens = torch.tensor([row["input_ids"] for row in rows(4)])
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.02)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens).logits
        merged = model.merge_and_unload()(input_ids=tokens).logits
    torch.testing.assert_close(merged, logits, rtol=0, atol=1e-4)
    return f"{'DoRA' if fields else 'LoRA'} {folder.name} learns, merged equal"


def main(work: Path) -> str:
    """Each mode of both kinds of model."""
    said = []
    for kind in ("llama", "gated_delta"):
        folder = folder_of(kind, work)
        plain = train(folder, work / "plain")
        compiled = train(folder, work / "compiled", torch_compile=True)
        said.append(check_same(f"{kind} compiled", compiled, plain, 1e-3))
        said.append(check_same(f"{kind} in two processes", in_two_processes(folder, work / "two"), plain, 1e-3))
        said += [check_adapters(folder), check_adapters(folder, use_dora=True)]
    return "; ".join(said)


if __name__ == "__main__" and len(sys.argv) == 3:
    two = train(Path(sys.argv[1]), Path(sys.argv[2]), per_device_train_batch_size=1)
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[2], "losses.json").write_text(json.dumps(two))
elif __name__ == "__main__":
    run_client(main, "transformers", "accelerate", "peft")
