"""Pipelines, an evaluation harness and a server of others, on a folder that heddle exported."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import heddle
from heddle.exchange.transformers import export
from tests import small
from tests.source import ROOT

OWN = {"residual": {"kind": "residual_dual"}}
TEMPLATE = (
    "{{ bos_token }}{% for said in messages %}{{ said.role }}: {{ said.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CHOICES = ["lifts a thread", "red cloth"]
PROMPTS = ["The weaver", "def weave(", "Another cloth is on"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A design that only our own class serves, with a tokenizer and a template for chats."""
    root = tmp_path_factory.mktemp("served")
    texts = small.corpus(root / "text")
    texts.tokenizer.companion_files = {"chat_template.jinja": TEMPLATE}
    model = heddle.build(small.config(small.design() | OWN), seed=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    assert export(model, root / "model", texts.tokenizer).family.model_type == "heddle"
    heddle.save(model, root / "ours", texts.tokenizer)
    return root


def loaded(folder: Path) -> tuple[heddle.Decoder, Any]:
    """The model and the tokenizer, by heddle."""
    return heddle.load(folder / "ours")


def test_pipeline_writes_what_heddle_writes(folder: Path) -> None:
    model, tokenizer = loaded(folder)
    expected = heddle.generate(model, PROMPTS, tokenizer, max_new_tokens=12)
    pipe = pipeline("text-generation", model=str(folder / "model"), device="cpu")
    pipe.tokenizer.pad_token, pipe.tokenizer.padding_side = pipe.tokenizer.eos_token, "left"
    for batch_size in (1, 3):
        outputs = pipe(PROMPTS, max_new_tokens=12, do_sample=False, return_full_text=False, batch_size=batch_size)
        assert [output[0]["generated_text"] for output in outputs] == expected


def test_pipeline_speaks_by_the_template_that_came_along(folder: Path, tmp_path: Path) -> None:
    """A chat is the text that the template makes of it, with the end token before."""
    model, tokenizer = loaded(folder)
    export(model, tmp_path, tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == TEMPLATE
    (expected,) = heddle.generate(model, ["user: The weaver\nassistant:"], tokenizer, max_new_tokens=9)
    pipe = pipeline("text-generation", model=str(tmp_path), device="cpu")
    outputs = pipe([{"role": "user", "content": "The weaver"}], max_new_tokens=9, do_sample=False)
    assert outputs[0]["generated_text"][-1] == {"role": "assistant", "content": expected}


def test_texts_stop_at_strings(folder: Path) -> None:
    """`generate` hands the tokenizer on to the model, which reads none."""
    model, tokenizer = (
        auto_class.from_pretrained(folder / "model") for auto_class in (AutoModelForCausalLM, AutoTokenizer)
    )
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
    stop = tokenizer.decode(written[-6:-4])
    cut = model.generate(**inputs, max_new_tokens=12, do_sample=False, tokenizer=tokenizer, stop_strings=[stop])[0]
    assert len(inputs.input_ids[0]) < len(cut) <= len(written) - 4
    assert torch.equal(cut, written[: len(cut)])


TASK = """
task: threads
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{target}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def test_lm_eval_scores_as_heddle_does(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model, tokenizer = loaded(folder)
    expected_scores = score(model, tokenizer)
    lines = [{"text": prompt, "choices": CHOICES, "target": 1} for prompt in PROMPTS]
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    (tmp_path / "threads.yaml").write_text(TASK.replace("FILE", str(tmp_path / "lines.jsonl")), encoding="utf-8")
    hf_model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert type(hf_model).__name__ == "HeddleForCausalLM"
    wrapped = HFLM(
        pretrained=hf_model, tokenizer=AutoTokenizer.from_pretrained(folder / "model"), device="cpu", batch_size=2
    )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = lm_eval.simple_evaluate(wrapped, tasks=["threads"], task_manager=manager, bootstrap_iters=0)
    assert results is not None
    for line, expected in zip(results["samples"]["threads"], expected_scores, strict=True):
        assert [log_likelihood for log_likelihood, _ in line["filtered_resps"]] == pytest.approx(expected, abs=1e-4)
    is_correct = [expected[1] == max(expected) for expected in expected_scores]
    assert results["results"]["threads"]["acc,none"] == pytest.approx(sum(is_correct) / len(is_correct))


@torch.no_grad()
def score(model: heddle.Decoder, tokenizer: Any) -> list[list[float]]:
    """The log-likelihood of each choice after each prompt, by the model of heddle."""
    scores: list[list[float]] = []
    for prompt in PROMPTS:
        prompt_ids = [tokenizer.eod_id, *tokenizer.encode(prompt)]
        scores.append([])
        for choice in CHOICES:
            text = [tokenizer.eod_id, *tokenizer.encode(f"{prompt} {choice}")]
            logits = model.head(model(torch.tensor([text]))[0])[0].log_softmax(-1)
            scores[-1].append(sum(float(logits[i - 1, text[i]]) for i in range(len(prompt_ids), len(text))))
    return scores


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    """The address of a server of transformers that finds our class through the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT / "src")]), "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),
    }  # fmt: skip
    command = [str(Path(sys.executable).with_name("transformers")), "serve", "--trust-remote-code"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", str(folder / "model")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        for _ in range(1200):
            assert process.poll() is None, (folder / "log").read_text()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                    break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(30)


def ask(address: str, question: dict[str, Any]) -> Any:
    """The answer's first choice."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(question).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]


def test_a_server_writes_what_heddle_writes(folder: Path, server: str) -> None:
    model, tokenizer = loaded(folder)
    expected = heddle.generate(model, [*PROMPTS, "user: Hm\nassistant:"], tokenizer, max_new_tokens=10)
    request = {"model": str(folder / "model"), "max_tokens": 10, "temperature": 0}
    for prompt, text in zip(PROMPTS, expected[:-1], strict=True):
        assert ask(f"{server}/completions", request | {"prompt": prompt})["text"] == text
    outputs = ask(f"{server}/chat/completions", request | {"messages": [{"role": "user", "content": "Hm"}]})
    assert outputs["message"]["content"] == expected[-1]
