"""The laws: properties that every design must have. The tests prove with planted bugs that each law can fail.

`heddle check DESIGN` and the tests run the same functions. A law is a function of a design. It builds the model in
float64 with random parameters and raises `LawViolation` with one sentence. Where a law cannot apply (decoding with a
bidirectional design), it checks that the design refuses, and raises `DoesNotApply` with the reason.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from heddle.errors import ConfigError, choices_hint
from heddle.laws import (
    causality,
    cross_attention,
    experts,
    isolation,
    kernels,
    options,
    positions,
    precision,
    residuals,
    states,
    training,
)
from heddle.laws.harness import DoesNotApply, LawViolation, ModelCache
from heddle.laws.shrink import shrink
from heddle.model.config import ModelConfig

__all__ = ["LAWS", "DoesNotApply", "Law", "LawViolation", "Result", "run", "shrink"]


class Law(NamedTuple):
    """A property of designs, in one sentence.

    check: raises LawViolation where it does not hold, and DoesNotApply where it says nothing.
    """

    name: str
    statement: str
    check: Callable[[ModelConfig], None]


class Result(NamedTuple):
    """The result of one law. message: what is violated. not_applicable: why the law says nothing about the design."""

    name: str
    passed: bool
    message: str
    seconds: float
    not_applicable: str = ""


def _law(check: Callable[[ModelConfig], None]) -> Law:
    statement = (check.__doc__ or "").strip().splitlines()[0]
    return Law(check.__name__, statement, check)


LAWS: dict[str, Law] = {
    law.name: law
    for law in map(
        _law,
        (
            states.chunked_decoding,
            states.all_chunkings,
            states.chunked_ragged_batch,
            states.cache_growth,
            states.state_errors,
            isolation.padding_invariance,
            isolation.padding_gradients,
            isolation.document_packing,
            isolation.decoding_after_packing,
            causality.causality,
            causality.document_isolation,
            causality.receptive_field,
            causality.selected_keys,
            isolation.nan_in_padding,
            isolation.nan_in_unused_slots,
            isolation.nan_in_other_rows,
            isolation.padding_not_cached,
            isolation.batch_invariance,
            isolation.row_isolation,
            isolation.call_isolation,
            isolation.batch_position_invariance,
            states.fork_isolation,
            states.state_row_selection,
            states.changing_batch,
            states.state_rollback,
            states.rollback_errors,
            states.rollback_size,
            cross_attention.cross_attention,
            training.multi_token_prediction,
            positions.position_shift_invariance,
            positions.rotary_invariants,
            positions.coordinate_shift_invariance,
            positions.dtype_round_trip,
            kernels.kernel_equivalence,
            precision.low_precision,
            precision.low_precision_state,
            kernels.extreme_inputs,
            kernels.bfloat16_kernels,
            kernels.bfloat16_isolation,
            training.dropout_off_in_eval,
            training.gradient_accumulation,
            training.activation_checkpointing,
            training.finite_differences,
            residuals.residual_identity,
            residuals.drop_path_rates,
            residuals.drop_path_scaling,
            experts.expert_permutation,
            experts.token_permutation,
            experts.top_k_routing,
            experts.idle_experts,
            experts.routing_ties,
            experts.router_statistics,
            experts.load_balancing,
            experts.router_precision,
            experts.token_isolation_in_training,
            training.complete_initialization,
            training.seeded_initialization,
            training.tied_head,
            training.state_dict_completeness,
            training.config_round_trip,
            training.size_matches_model,
            options.options_have_effect,
        ),
    )
}


def run(
    config: ModelConfig, names: Iterable[str] | None = None, device: torch.device | str = "cpu"
) -> Iterator[Result]:
    """Check a design against some laws (default: all), and yield each result as soon as it is known.

    Large designs should be made small first, with `shrink`. Raises ConfigError for an unknown name, before the first
    law is checked. Any other error within a law is reported in its result.
    """
    selected = list(LAWS) if names is None else list(names)
    for name in selected:
        if name not in LAWS:
            raise ConfigError(f"law '{name}' is unknown; {choices_hint(name, LAWS)}")
    models = ModelCache()
    return (_result(LAWS[name], config, device, models) for name in selected)


def _result(law: Law, config: ModelConfig, device: torch.device | str, models: ModelCache) -> Result:
    start = time.perf_counter()
    message = reason = ""
    try:
        with _default_device(device), models.use():
            law.check(config)
    except DoesNotApply as error:
        reason = str(error)
    except LawViolation as error:
        message = str(error)
    except Exception as error:  # a part that raises any other error violates the law too
        message = f"stopped by {type(error).__name__}: {error}"
    return Result(law.name, not message, message, time.perf_counter() - start, reason)


def _default_device(device: torch.device | str) -> AbstractContextManager[object]:
    """Create tensors on this device within the block. A no-op if they already are: the mode slows every call."""
    target = torch.device(device)
    return nullcontext() if target == torch.get_default_device() else target
