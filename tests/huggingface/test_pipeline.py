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
from heddle.huggingface import export
from tests import small

OWN = {"residual": {"kind": "residual_dual"}}
PROMPTS = ["The weaver", "def weave(", "Another cloth is on"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A design that only our own class serves, with a tokenizer."""
    root = tmp_path_factory.mktemp("served")
    texts = small.corpus(root / "text")
    model = heddle.build(small.config(small.design() | OWN), seed=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    assert export(model, root / "model", texts.tokenizer).family.model_type == "heddle"
    heddle.save(model, root / "ours", texts.tokenizer)
    return root


def test_pipeline_writes_what_heddle_writes(folder: Path) -> None:
    model, tokenizer = heddle.load(folder / "ours")
    wanted = heddle.generate(model, PROMPTS, tokenizer, max_new_tokens=12)
    write = pipeline("text-generation", model=str(folder / "model"), device="cpu")
    write.tokenizer.pad_token, write.tokenizer.padding_side = write.tokenizer.eos_token, "left"
    for batch_size in (1, 3):
        told = write(PROMPTS, max_new_tokens=12, do_sample=False, return_full_text=False, batch_size=batch_size)
        assert [one[0]["generated_text"] for one in told] == wanted
