"""Checking a design against every law, or some."""

from collections.abc import Iterable

from heddle.laws import LAWS, run
from heddle.model.config import ModelConfig

OPTIONS = "options_have_effect"  # takes as long as all others, since it builds the design anew for each of its fields
OTHERS = [name for name in LAWS if name != OPTIONS]
# What these look at is one part at a time, whatever stands beside it.
OF_ONE_PART = [
    "kernel_equivalence", "low_precision", "low_precision_state", "extreme_inputs", "bfloat16_kernels",
    "finite_differences",
    "rotary_invariants", "coordinate_shift_invariance", "dtype_round_trip",
    "residual_identity", "drop_path_rates", "drop_path_scaling",
    "expert_permutation", "token_permutation", "top_k_routing", "idle_experts", "routing_ties", "load_balancing",
    "router_precision", "complete_initialization", "seeded_initialization",
]  # fmt: skip
OF_PAIRS = [name for name in OTHERS if name not in OF_ONE_PART]


def violations_of(config: ModelConfig, names: Iterable[str] | None = None) -> list[str]:
    """The laws (default: all) that a design violates, each with its message and the design."""
    return [f"{result.name}: {result.message}\n  {config.dump()}" for result in run(config, names) if not result.passed]
