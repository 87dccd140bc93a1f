"""`heddle doctor`, and `heddle show` for a device that this machine need not have."""

import json
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

import pytest
import torch

from heddle.cli import doctor
from heddle.cli.main import run_command
from heddle.cli.show import _print_facts, print_kernels
from heddle.lab.show import ShowSettings, show
from heddle.runtime import device_name, is_available

PRESET = "preset:gqa-tiny"


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert run_command(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("heddle.runtime.MEASUREMENTS", 1)


def test_doctor_says_that_there_is_no_gpu_and_chooses_as_on_one(capsys: pytest.CaptureFixture[str]) -> None:
    out = output(capsys, "doctor", "preset:gqa-tiny", "--gpu")
    lines = out.splitlines()
    assert lines[0].split(None, 1) == [
        "device",
        "cuda: torch finds none on this machine; kernels are chosen as for one, and none runs",
    ]
    assert [line.split()[0] for line in lines if line and not line.startswith(" ")][:6] == [
        "device", "machine", "versions", "limits", "choices", "compile"
    ]  # fmt: skip
    assert "measured on cpu" in out
    assert "preset:gqa-tiny, 2,048 tokens in bf16 on cuda" in out
    reasons = [line.partition(": ") for line in lines if line.startswith("      not ")]
    assert any("triangle" in kernels and reason == "it runs on the CPU only" for kernels, _, reason in reasons)
    assert len(lines) <= 50, "one screen for a design"


def test_kernels_with_one_reason_share_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    rejected = [["flash", "it runs on CUDA only"], ["causal", "a window"], ["varlen", "it runs on CUDA only"]]
    choice = {"operation": "attention", "kernel": "blocks", "calls": 2, "rejected": rejected}
    print_kernels({"training": [choice]})
    lines = capsys.readouterr().out.splitlines()[2:]
    assert lines == [
        "  attention = blocks, 2 calls",
        "      not flash, varlen: it runs on CUDA only",
        "      not causal: a window",
    ]
    print_kernels({"training": [choice]}, with_reasons=False)
    assert capsys.readouterr().out.splitlines()[2:] == lines[:1]


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(output(capsys, "doctor", "preset:gated_delta-tiny", "--device", "cpu", "--json"))
    assert (facts["device"], facts["available"], facts["precision"]) == ("cpu", True, "bf16")
    assert set(facts["packages"]) == set(doctor.OPTIONAL_PACKAGES)
    assert all(value > 0 for value in facts["limits"].values())
    (kernels,) = facts["designs"].values()
    assert {choice["operation"] for choice in kernels["training"]} >= {"delta", "convolution"}


def test_doctor_takes_two_designs_by_default_and_refuses_a_wrong_one(capsys: pytest.CaptureFixture[str]) -> None:
    out = output(capsys, "doctor", "--device", "cpu")
    assert all(f"{name}, 2,048 tokens in bf16 on cpu" in out for name in doctor.DEFAULT_DESIGNS)
    assert run_command(["doctor", "preset:gqa-tinny"]) == 2
    assert "did you mean 'preset:gqa-tiny'" in capsys.readouterr().err
    assert run_command(["doctor", "--device", "tpu"]) == 2
    assert "device tpu: unknown device; choices: auto, cpu, cuda" in capsys.readouterr().err


def test_a_package_is_usable_not_installed_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", missing)
    assert doctor.package_state("triton")["unusable"] == "not installed"
    monkeypatch.setattr(doctor, "version", lambda name: "9.1")
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    assert doctor.package_state("triton") == {"purpose": doctor.OPTIONAL_PACKAGES["triton"].purpose, "version": "9.1"}

    def broken(name: str) -> ModuleType:
        raise OSError("libcuda.so.1: cannot open\nmore")

    monkeypatch.setattr(doctor, "import_module", broken)
    assert doctor.package_state("triton")["unusable"] == "its import failed: OSError: libcuda.so.1: cannot open"


def test_show_chooses_kernels_as_on_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {
        device: json.loads(
            output(capsys, "show", "preset:gqa-tiny", "--device", device, "--json", "--precision", "bf16")
        )
        for device in ("cpu", "cuda")
    }
    assert facts["cuda"]["device"] == "cuda"
    reasons = {
        device: {reason for choice in fact["kernels"]["training"] for _, reason in choice["rejected"]}
        for device, fact in facts.items()
    }
    assert "it runs on the CPU only" in reasons["cuda"] - reasons["cpu"]
    assert facts["cpu"]["parameters"] == facts["cuda"]["parameters"]


def test_show_ends_with_the_command_for_the_same_design(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ShowSettings(design=PRESET, overrides=("width=64", "layers.*.mixer.window=8"))
    _print_facts(replace(settings, part=(Path("my parts/a.py"),)), show(settings).facts)
    said = (
        "heddle doctor preset:gqa-tiny width=64 'layers.*.mixer.window=8' --part 'my parts/a.py' says why other kernels"
    )
    assert said in capsys.readouterr().out.splitlines()[-1]


def test_a_device_has_a_name_whether_or_not_it_is_there() -> None:
    assert device_name("auto") in ("mps", "cpu")
    assert device_name("cuda") == "cuda"
    assert not is_available("cuda")
