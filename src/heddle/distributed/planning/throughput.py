"""Expected time of a step: products, attention, communication and the optimizer.

    products = 3 F / (peak · e · w / (w + w₀)),   attention = 3.5 F / (peak · e_a),   both with one forward pass more
    where layers are recomputed;   step = compute + communication − o · min(compute, communication) + optimizer

w is the model's width: narrow layers spend more of their time between the products. The constants are fitted to
published trainings of one program (docs/plan.md); they say what a good trainer reached, not what this one will.
"""

from dataclasses import dataclass

from heddle.distributed.planning.collectives import collectives
from heddle.distributed.planning.costs import ModelCost
from heddle.distributed.planning.gpus import Gpu
from heddle.distributed.planning.ranks import RankLayout

OPTIMIZER_BYTES = 32  # read and written for each parameter: weight, gradient, two moments, and again all but one
FP8_PRODUCTS = 1.155  # speed of training with products in fp8, over bfloat16
# Selective recomputation computes every second product of a layer again: k, the output and up of a Llama layer's seven,
# which are 36 % of its FLOPs from 8B to 405B.
_SELECTIVE = 0.35
BACKWARD_ATTENTION = 2.5  # FLOPs of its backward pass over those of its forward pass: scores are computed again


@dataclass(frozen=True)
class Speeds:
    """Fractions of a GPU's peaks. half_width: the width at which products reach half of `products`.

    network: of the links' speed. overlap: of communication that hides behind products.
    """

    products: float
    half_width: float
    attention: float
    network: float
    overlap: float


AMPERE = Speeds(products=0.807, half_width=787.0, attention=0.321, network=1.0, overlap=0.877)
HOPPER = Speeds(products=0.705, half_width=1167.0, attention=0.176, network=1.0, overlap=0.877)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on a rank."""

    products: float
    attention: float
    communication: float
    optimizer: float
    overlap: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        compute = self.products + self.attention
        hidden = self.overlap * min(compute, self.communication)
        return compute + self.communication - hidden + self.optimizer


def fitted_speeds(gpu: Gpu) -> Speeds:
    """The fitted fractions for a GPU: those of its generation, or of the last one that was published."""
    return AMPERE if gpu.tflops < 500 else HOPPER


def step_time(cost: ModelCost, layout: RankLayout, gpu: Gpu, speeds: Speeds | None = None) -> StepTime:
    """The expected time of one step."""
    speeds = speeds or fitted_speeds(gpu)
    rows, peak = layout.rows * layout.accumulation, gpu.tflops * 1e12
    again = {"none": 0.0, "selective": _SELECTIVE, "layers": 1.0}[layout.recompute]
    attention = cost.attention_flops
    linear = cost.forward_flops - attention
    recomputed = linear - cost.head_flops
    efficiency = speeds.products * cost.width / (cost.width + speeds.half_width)
    traffic = 0.0
    for collective in collectives(cost, layout):
        link = gpu.link if layout.gpus <= gpu.gpus_per_node else gpu.network
        traffic += collective.traffic / (link * 1e9 * speeds.network)
    return StepTime(
        products=rows * (3 * linear + again * recomputed) / (peak * efficiency),
        attention=rows * attention * (1 + BACKWARD_ATTENTION + float(again == 1.0)) / (peak * speeds.attention),
        communication=traffic,
        optimizer=OPTIMIZER_BYTES * cost.parameters / layout.shard / (gpu.bandwidth * 1e9),
        overlap=speeds.overlap,
    )


def tokens_per_second(cost: ModelCost, layout: RankLayout, gpu: Gpu, speeds: Speeds | None = None) -> float:
    """Expected tokens a second on each GPU."""
    tokens = layout.rows * layout.accumulation * cost.sequence_length
    return tokens / step_time(cost, layout, gpu, speeds).seconds
