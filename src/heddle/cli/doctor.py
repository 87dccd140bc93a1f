"""`heddle doctor`: this machine's limits, and which kernel each operation of a design uses on a device, and why."""

import json
import os
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from getpass import getuser
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from heddle.cli.show import print_kernels
from heddle.errors import ConfigError, MachineError
from heddle.progress import format_amount, printable
from heddle.session import dtype_of, load_parts
from heddle.settings import Argument, Deterministic, Json, Option, PartFile, Precision, VerbSettings
from heddle.tokenization import DEFAULT_VOCAB_SIZE

if TYPE_CHECKING:
    import torch

DEFAULT_DESIGNS = ("preset:gqa-small", "preset:gated_delta-small")
CONTEXT_LENGTH = 2048
LABEL_WIDTH = 12


class OptionalPackage(NamedTuple):
    """A package that some kernels need: the module to import, and what it computes."""

    module: str
    purpose: str


OPTIONAL_PACKAGES = {
    "triton": OptionalPackage("triton", "what torch.compile generates for a GPU"),
    "flash-linear-attention": OptionalPackage("fla", "linear attention, retention, delta rules, Mamba-2"),
    "causal-conv1d": OptionalPackage("causal_conv1d", "short convolutions"),
    "torchao": OptionalPackage("torchao", "FP8 matmuls"),
}


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(VerbSettings):
    """Settings of `heddle doctor`."""

    designs: Annotated[
        tuple[str, ...], Argument("DESIGN", "Files, preset:NAME or folders. [gqa and gated_delta presets]")
    ] = ()
    device: Annotated[str, Option("NAME", "auto, cpu, cuda, cuda:N or mps; it need not be present.")] = "auto"
    gpu: Annotated[bool, Option("", "The same as --device cuda.")] = False
    measure: Annotated[bool, Option("", "Measure again what is fastest on this CPU.")] = False
    precision: Precision = "bf16"
    deterministic: Deterministic = False
    part: PartFile = ()
    json: Json = False


def doctor(settings: DoctorSettings) -> None:
    """Print the limits of this machine, the packages that kernels need, and the kernel that each operation uses.

    It works without a GPU: kernels are then chosen as for a GPU, and none runs.
    """
    from heddle.numerics.dispatch import choose_deterministic

    load_parts(settings.part)
    dtype = dtype_of(settings.precision)
    facts = machine_facts("cuda" if settings.gpu else settings.device, settings.measure)
    facts["precision"] = settings.precision
    with choose_deterministic() if settings.deterministic else nullcontext():
        facts["designs"] = {
            design: kernel_facts(design, dtype, facts["device"])
            for design in dict.fromkeys(settings.designs or DEFAULT_DESIGNS)
        }
    if settings.json:
        print(json.dumps(facts, indent=2))
    else:
        _print_facts(facts)


def machine_facts(device: str, anew: bool = False) -> dict[str, Any]:
    """Device, hardware, versions, measured limits, optional packages and the folder of compiled code, as plain data.

    choices: how matmuls and attention are computed on this CPU; measured: the timings behind them. anew: measure again.
    """
    from heddle.lab.bench.run import measure_limits
    from heddle.runtime import device_name, hardware, is_available, versions

    name = device_name(device)
    available = is_available(name)
    return {
        "device": name,
        "available": available,
        "hardware": hardware() | _gpu_facts(name if available else "cuda"),
        "versions": versions() | _torch_builds(),
        "limits": measure_limits(name if available else "cpu"),
        **_cpu_choices(anew),
        "packages": {package: package_state(package) for package in OPTIONAL_PACKAGES},
        "compile_cache": _compile_cache(),
    }


def _cpu_choices(anew: bool) -> dict[str, Any]:
    from heddle.machine import VARIABLE, choices_from, measured_choices, measured_facts

    measured = {}
    if not os.environ.get(VARIABLE):
        with suppress(ConfigError, MachineError):  # no home, or a full disk
            measured = measured_facts(anew=anew)
    choices = choices_from(measured) if measured else measured_choices()
    return {"choices": choices.dump(), "measured": measured}


def kernel_facts(design: str, dtype: "torch.dtype", device: str) -> dict[str, list[dict[str, Any]]]:
    """By phase, the kernel of each operation of a design on a device, and why better ones were rejected."""
    from heddle.lab.show import kernels_by_phase
    from heddle.model.load_config import load_config, with_vocab_size
    from heddle.model.size import build_distinct_layers

    config = with_vocab_size(load_config(design), DEFAULT_VOCAB_SIZE)
    return kernels_by_phase(build_distinct_layers(config, dtype), CONTEXT_LENGTH, device)


def package_state(package: str) -> dict[str, str]:
    """What a package of `OPTIONAL_PACKAGES` is for, and its version, or why it cannot be used, in one sentence."""
    module, purpose = OPTIONAL_PACKAGES[package]
    state = {"purpose": purpose}
    try:
        state["version"] = version(package)
    except PackageNotFoundError:
        return state | {"unusable": "not installed"}
    try:
        import_module(module)
    except Exception as error:  # importing a package for another device may raise anything
        reason = (str(error).splitlines() or [""])[0]
        state["unusable"] = f"its import failed: {type(error).__name__}: {reason}"
    return state


def _gpu_facts(device: str) -> dict[str, Any]:
    """The properties of a GPU from torch; of the first GPU if `device` is not one."""
    import torch

    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(device if device.startswith("cuda:") else 0)
    return {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "gpu_memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
    }


def _torch_builds() -> dict[str, str]:
    """The versions of CUDA and cuDNN that torch was built with, or none."""
    import torch

    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {"cuda": torch.version.cuda or "none", "cudnn": "none" if cudnn is None else str(cudnn)}


def _compile_cache() -> str:
    """The folder of compiled code. Without a home: torch's default (its own function imports the compiler)."""
    from heddle.data.cache import use_own_compile_cache

    use_own_compile_cache()
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return folder or str(Path(gettempdir()) / f"torchinductor_{getuser()}")


def _print_facts(facts: dict[str, Any]) -> None:
    for label, text in _lines(facts):
        print(f"{label:{LABEL_WIDTH}}{printable(text)}")
    for design, phases in facts["designs"].items():
        print(f"\n{printable(design)}, {CONTEXT_LENGTH:,} tokens in {facts['precision']} on {facts['device']}")
        print_kernels(phases)


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The lines about the machine, each with its label."""
    hardware, limits, device = facts["hardware"], facts["limits"], facts["device"]
    lines = [("device", _describe_device(facts))]
    lines.append(("machine", f"{hardware['cpu']}, {hardware['cores']} cores, "
                  f"{format_amount(hardware['memory_bytes'], 'bytes')} of memory"))  # fmt: skip
    lines.append(("versions", ", ".join(f"{name} {number}" for name, number in facts["versions"].items())))
    measured = device if facts["available"] else "cpu"
    lines.append(("limits", f"reads {limits['read_bytes_per_second'] / 1e9:,.0f} GB/s, "
                  f"copies {limits['copy_bytes_per_second'] / 1e9:,.0f} GB/s, matmuls "
                  f"{limits['bf16_flops_per_second'] / 1e12:,.1f} TFLOP/s in bf16 and "
                  f"{limits['fp32_flops_per_second'] / 1e12:,.1f} in fp32, a launch "
                  f"{limits['launch_seconds'] * 1e6:,.1f} µs; measured on {measured}"))  # fmt: skip
    lines += _choice_lines(facts["choices"], facts["measured"])
    lines.append(("compile", f"cache in {facts['compile_cache']}"))
    for name, state in facts["packages"].items():
        usable = "unusable" not in state
        text = f"{name} {state['version']}" if usable else f"{name}: {state['unusable']}"
        lines.append(("packages" if name == next(iter(facts["packages"])) else "", f"{text} ({state['purpose']})"))
    return lines


def _choice_lines(choices: dict[str, Any], measured: dict[str, Any]) -> list[tuple[str, str]]:
    """How float32 matmuls, matmuls of few rows and attention are computed on this CPU, and what was measured."""

    def ratios(speedups: dict[str, float]) -> str:
        return ", ".join(f"{name} {ratio:.2f}" for name, ratio in speedups.items())

    routes, attention = (ratios(measured.get(name, {}).get("speedups", {})) for name in ("products", "attention"))
    lengths = ", ".join(map(str, choices["triangle_lengths"])) or "none"
    lines = [
        f"float32 matmuls: {choices['matmul']}{_in_brackets(routes)}",
        f"attention in training by plain matmuls: sequences of up to {lengths} tokens{_in_brackets(attention)}",
    ]
    for name, row in measured.get("packing", {}).items():
        lines.append(f"{name} rows: {row['way']}{_in_brackets(ratios(row['speedups']))}")
    own = measured.get("native", {})
    if "unusable" in own:
        lines.append(f"C++ operators: none, because {own['unusable']}")
    else:
        names = ", ".join(choices["native"]) or "none"
        lines.append(f"C++ operators: {names}{_in_brackets(ratios(own.get('speedups', {})))}")
    if not measured:
        lines.append("nothing was measured here: these are the defaults, or the choices of $HEDDLE_MACHINE")
    return [("choices" if number == 0 else "", line) for number, line in enumerate(lines)]


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _describe_device(facts: dict[str, Any]) -> str:
    hardware, device = facts["hardware"], facts["device"]
    if not facts["available"]:
        return f"{device}: torch finds none on this machine; kernels are chosen as for one, and none runs"
    if not device.startswith("cuda"):
        return f"{device}"
    memory = format_amount(hardware["gpu_memory_bytes"], "bytes")
    count = "" if hardware["gpus"] == 1 or device != "cuda" else f"{hardware['gpus']} × "
    gpu, capability = hardware["gpu"], hardware["compute_capability"]
    return f"{device}: {count}{gpu}, {memory}, compute capability {capability}"
