"""GPUs by their makers' data sheets, and the speeds that published training runs reached on them."""

from dataclasses import dataclass

from heddle.errors import ConfigError, choices_hint

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU in a node of eight. Speeds are peaks of the data sheet.

    tflops: dense products in bfloat16, 10^12 FLOP/s. memory: GiB. bandwidth: of its memory, GB/s. link: to
    other GPUs of its node, network: to other nodes, both GB/s in each direction.
    """

    tflops: float
    memory: float
    bandwidth: float
    link: float
    network: float
    gpus_per_node: int = 8


GPUS = {
    "rtx4090": Gpu(tflops=165, memory=23.5, bandwidth=1008, link=32, network=25),  # PCIe 4.0
    "l40s": Gpu(tflops=362, memory=44.4, bandwidth=864, link=32, network=25),
    "a100-40gb": Gpu(tflops=312, memory=39.4, bandwidth=1555, link=300, network=25),
    "a100": Gpu(tflops=312, memory=79.2, bandwidth=2039, link=300, network=25),
    "h100": Gpu(tflops=989, memory=79.2, bandwidth=3350, link=450, network=50),
    "h800": Gpu(tflops=989, memory=79.2, bandwidth=3350, link=200, network=50),
    "h200": Gpu(tflops=989, memory=139.8, bandwidth=4800, link=450, network=50),
    "b200": Gpu(tflops=2250, memory=178.4, bandwidth=8000, link=900, network=50),
}


def find_gpu(name: str) -> Gpu:
    """Look up a GPU by name. Raises ConfigError for an unknown one."""
    if name not in GPUS:
        raise ConfigError(f"gpu {name}: unknown GPU; {choices_hint(name, GPUS)}")
    return GPUS[name]
