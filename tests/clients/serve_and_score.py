"""`transformers serve` (models, responses whole and streamed) and the command of lm-eval: native exports and ours."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch

import heddle
from heddle.exchange.load import load
from tests.clients.folders import folder_of, run_client

PROMPTS = ["The weaver", "Another cloth is on", "A", "The", "The weaver lifts", "Red", "The weaver lifts a thread", "a"]
CHOICES = [" lifts a thread", " red cloth"]
TASK = """
task: threads
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{target}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@contextmanager
def server_of(folder: Path, work: Path) -> Iterator[str]:
    """The address of `transformers serve` on a folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("transformers")),
        "serve",
        "--trust-remote-code",
        "--host",
        "127.0.0.1",
    ]
    command += ["--port", str(port), "--device", "cpu", str(folder)]
    repository = work / "home" / "hub" / f"models--weavers--{folder.name}"  # /v1/models lists the cache of the hub
    shutil.copytree(folder, repository / "snapshots" / "1")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1", encoding="utf-8")
    with (work / "log").open("w") as log:
        process = subprocess.Popen(command, env=os.environ | {"HF_HOME": str(work / "home")}, stdout=log, stderr=log)
    try:
        for _ in range(1200):
            assert process.poll() is None, (work / "log").read_text()
            try:
                with urlopen(f"http://127.0.0.1:{port}/health"):
                    break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    except OSError as error:
        raise AssertionError((work / "log").read_text()[-3000:]) from error
    finally:
        process.terminate()
        process.wait(30)


def ask(address: str, question: dict[str, Any] | None = None) -> bytes:
    """The body of an answer."""
    data = None if question is None else json.dumps(question).encode()
    with urlopen(Request(address, data, {"Content-Type": "application/json"})) as answer:
        body: bytes = answer.read()
    return body


def check_server(folder: Path, work: Path) -> str:
    """The list of models, and a response whole and in pieces, equal to heddle's own text."""
    imported = load(folder)
    assert imported.tokenizer is not None
    (expected,) = heddle.generate(imported.model, ["user: The weaver lifts\n"], imported.tokenizer, max_new_tokens=10)
    request = {"model": str(folder), "input": "The weaver lifts", "max_output_tokens": 10, "temperature": 0}
    with server_of(folder, work) as address:
        models = json.loads(ask(f"{address}/models"))["data"]
        response = json.loads(ask(f"{address}/responses", request | {"stream": False}))
        events = ask(f"{address}/responses", request | {"stream": True}).decode()
    assert [model["id"] for model in models] == [f"weavers/{folder.name}"], models
    (content,) = [part["text"] for item in response["output"] for part in item["content"]]
    assert content == expected, (content, expected)
    pieces = [json.loads(line[5:]) for line in events.splitlines() if line.startswith("data:") and "{" in line]
    deltas = "".join(piece["delta"] for piece in pieces if piece.get("type") == "response.output_text.delta")
    assert deltas == expected, (deltas, expected)
    return f"serve {folder.name}: /v1/models lists {models[0]['id']}, a response whole and streamed"


@torch.no_grad()
def scores_of(folder: Path) -> list[list[float]]:
    """The log-probability of each choice after each prompt [prompts][choices], by heddle."""
    imported = load(folder)
    model, tokenizer = imported.model, imported.tokenizer
    assert tokenizer is not None
    scores: list[list[float]] = []
    for prompt in PROMPTS:
        scores.append([])
        for choice in CHOICES:
            tokens = [tokenizer.eod_id, *tokenizer.encode(prompt + choice)]
            logits = model.head(model(torch.tensor([tokens]))[0])[0].log_softmax(-1)
            start = 1 + len(tokenizer.encode(prompt))
            scores[-1].append(sum(float(logits[t - 1, tokens[t]]) for t in range(start, len(tokens))))
    return scores


def check_harness(folder: Path, work: Path) -> str:
    """lm-eval's command finds the scores and the accuracy that heddle computes."""
    lines = [{"text": prompt, "choices": CHOICES, "target": i % 2} for i, prompt in enumerate(PROMPTS)]
    (work / "lines.jsonl").write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    (work / "threads.yaml").write_text(TASK.replace("FILE", str(work / "lines.jsonl")), encoding="utf-8")
    command = [
        str(Path(sys.executable).with_name("lm_eval")),
        "--model",
        "hf",
        "--trust_remote_code",
        "--device",
        "cpu",
    ]
    command += ["--model_args", f"pretrained={folder}", "--tasks", "threads", "--include_path", str(work)]
    command += ["--log_samples", "--output_path", str(work / "scores")]
    environment = os.environ | {"HF_HOME": str(work / "home")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = scores_of(folder)
    (file,) = (work / "scores").rglob("samples_threads*.jsonl")
    samples = sorted(
        map(json.loads, file.read_text(encoding="utf-8").splitlines()), key=lambda sample: sample["doc_id"]
    )
    actual = [[float(score) for score, _ in sample["filtered_resps"]] for sample in samples]
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=0, atol=1e-3)
    accuracy = sum(scores[i % 2] == max(scores) for i, scores in enumerate(expected)) / len(expected)
    assert re.search(rf"threads.*acc +\|↑ +\| +{accuracy:g}0*\|", done.stdout), (accuracy, done.stdout)
    return f"lm_eval {folder.name}: {2 * len(expected)} scores equal, accuracy {accuracy:g}"


def main(work: Path) -> str:
    """Both, of both kinds of export."""
    said = []
    for kind in ("llama", "gated_delta"):
        folder = folder_of(kind, work, pad=True, steps=60)
        own = work / kind
        own.mkdir()
        said += [check_server(folder, own), check_harness(folder, own)]
    return "; ".join(said)


if __name__ == "__main__":
    run_client(main, "transformers", "lm_eval")
