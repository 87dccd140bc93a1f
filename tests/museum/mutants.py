"""Bugs outside of the parts, each planted in one function, with the test that fails on it.

A bug of a part is planted beside the laws, in `tests/laws/test_planted.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from torch import Tensor
from torch.nn import functional

from heddle.data.chat import ChatFormat
from heddle.data.corpus import prepare_corpus
from heddle.data.samples import epoch_shuffle
from heddle.exchange.gguf.architectures import _transforms_of
from heddle.exchange.gguf.export import _model_keys
from heddle.exchange.rope import write_rope_table
from heddle.generation.decode import Sampler
from heddle.numerics.attention.softmax import softmax_weights
from heddle.numerics.experts.mixture import route
from heddle.numerics.norms import reference as rms_reference
from heddle.numerics.recurrent.batched_chunks import head_decays
from heddle.serving.engine import Engine
from heddle.storage.checkpoints import prune_checkpoints
from heddle.storage.file_io import NewFile, leftover_path
from heddle.tokenization.backend import byte_level_pre_tokenizer
from heddle.training.checkpoint import resume_run
from heddle.training.loop import prepared_batches
from heddle.training.optimizer import MasterWeights, Optimizer
from heddle.training.settings import scheduled_learning_rate
from heddle.training.step import RouterMetricsCollector, accumulate_gradients, apply_gradients
from tests.laws.planting import assigned, calls, condition, constant, replaced, result, wrapped


class Mutant(NamedTuple):
    """With the plant, the test `killer` (a node id) must fail."""

    description: str
    killer: str
    plant: Callable[[pytest.MonkeyPatch], None]
    is_slow: bool = False  # killed in `make soak` only


RESUME, STEP, FIRST = (
    "tests/training/test_resume.py",
    "tests/training/test_step.py",
    "tests/training/test_first_non_finite.py",
)
NEVER_SKIPPED = condition(apply_gradients, "is_finite", True)


def differences(sums: Tensor, *, log_decay: Tensor) -> Tensor:
    ends = functional.pad(log_decay.cumsum(-2), (0, 0, 1, 0))
    return ends[..., 1:, :] - ends.mT


def from_the_first_batch(prepared: Any, batch_at: Callable[[int], Any], *rest: Any) -> Any:
    first: list[int] = []

    def shifted(step: int) -> Any:
        first.append(step)
        return batch_at(step - first[0])

    return prepared(shifted, *rest)


def multiplied_by_zero(patch: pytest.MonkeyPatch) -> None:
    NEVER_SKIPPED(patch)
    calls(
        apply_gradients,
        "step",
        lambda optimizer, rate, skipped, *, result: optimizer.step(rate * float(result.is_finite), skipped),
    )(patch)


# fmt: off
MUTANTS = [
    # Exchange
    Mutant("keys permuted with the number of query heads",
           "tests/exchange/test_gguf_read.py::test_what_was_written_is_read",
           wrapped(_transforms_of, lambda transforms, name, config, graph:
                   transforms(name, config | {"num_key_value_heads": config["num_attention_heads"]}, graph)),
           is_slow=True),
    Mutant("the base of the rotary frequencies left out of an export",
           "tests/exchange/test_config_formats.py::test_an_export_says_the_same_to_older_and_newer_readers",
           result(write_rope_table, lambda table: table | {"rope_theta": 10000.0}), is_slow=True),
    Mutant("the default epsilon in an export",
           "tests/exchange/test_gguf_read.py::test_what_was_written_is_read",
           result(_model_keys, lambda keys:
                  {name: 1e-5 if name.endswith("epsilon") else value for name, value in keys.items()}), is_slow=True),
    Mutant("1 added twice to norm weights on the way out",
           "tests/exchange/test_gguf_read.py::test_what_was_written_is_read",
           constant(_transforms_of, 1.0, 2.0, nth=0), is_slow=True),
    # Numbers
    Mutant("a norm in half precision", "tests/numerics/test_norms.py::test_statistics_are_wide",
           calls(rms_reference, "at_least_float32", lambda widen, x: x)),
    Mutant("a query without keys that sees something",
           "tests/numerics/test_attention.py::test_a_query_without_visible_keys_gives_zeros_and_no_gradient",
           calls(softmax_weights, "masked_fill", lambda weights, *_: weights, nth=1)),
    Mutant("decays as differences of cumulative sums",
           "tests/numerics/test_gated_delta.py::test_a_sudden_strong_decay_costs_no_precision",
           assigned(head_decays, "sums", differences)),
    Mutant("gates from a softmax over all experts instead of the chosen",
           "tests/numerics/test_routing.py::test_formulas",
           calls(route, "softmax", lambda _, dim, *, probabilities, expert_indices:
                 probabilities.gather(dim, expert_indices), nth=1)),
    # Training
    Mutant("gradients averaged by the micro-batch",
           f"{STEP}::test_any_split_of_asked_targets_has_the_same_gradients",
           calls(accumulate_gradients, "loss_sum", lambda loss_sum, hidden, head, targets, *, targets_in_batch, batch:
                 loss_sum(hidden, head, targets) * targets_in_batch / (len(targets) * len(batch.parts)))),
    Mutant("the auxiliary losses of all layers but the last forgotten",
           "tests/training/test_experts.py::test_loss_and_penalty_are_those_of_plain_autograd",
           assigned(RouterMetricsCollector.add, "aux_loss", lambda total, *, share: share, nth=1)),
    Mutant("a balancing bias that only the first layer gets",
           "tests/training/test_experts.py::test_each_mixture_is_told_its_loads_once_a_step",
           calls(apply_gradients, "items", lambda metrics: list(metrics.items())[:1]), is_slow=True),
    Mutant("the order of the first epoch repeated",
           "tests/data/test_samples.py::test_every_epoch_has_another_order",
           calls(epoch_shuffle, "feistel_permute", lambda permute, positions, count, key:
                 permute(positions, count, (*key[:-1], 0))), is_slow=True),
    Mutant("a resumed run that begins with the first batch again",
           f"{RESUME}::test_death_at_every_second_step_of_one_run",
           wrapped(prepared_batches, from_the_first_batch), is_slow=True),
    Mutant("the state of the random numbers not restored",
           f"{RESUME}::test_a_checkpoint_holds_the_state_of_the_random_numbers",
           calls(resume_run, "set_rng_state", lambda torch, state: None), is_slow=True),
    Mutant("a first step with a learning rate of 0",
           "tests/training/test_settings.py::test_every_step_has_a_rate_above_zero_and_none_above_the_highest",
           wrapped(scheduled_learning_rate, lambda rate, settings, step: rate(settings, step - 1))),
    Mutant("copies of bfloat16 weights in bfloat16",
           "tests/training/test_master_weights.py::test_small_updates_are_not_lost",
           calls(MasterWeights.__init__, "float", lambda weight: weight.clone()), is_slow=True),
    Mutant("a gradient that is not finite clipped and applied",
           f"{STEP}::test_a_bad_number_changes_neither_weights_nor_moments", NEVER_SKIPPED),
    Mutant("an update multiplied by zero instead of left out",
           f"{STEP}::test_a_bad_number_changes_neither_weights_nor_moments", multiplied_by_zero, is_slow=True),
    Mutant("moments that are not finite taken for good",
           f"{FIRST}::test_nothing_moves_and_the_place_is_named_wherever_a_number_is_not_finite",
           calls(Optimizer.is_finite, "_moments", lambda optimizer: ()), is_slow=True),
    # Data
    Mutant("the token that ends an answer never learned",
           "tests/data/test_chat.py::test_default_template_and_labels_of_batches",
           assigned(ChatFormat._encode_answers, "stop", lambda stop: stop - 1)),
    Mutant("a tokenizer exchanged for another of as many tokens",
           "tests/data/test_corpus.py::test_hash_names_content_weights_and_tokenizer",
           calls(prepare_corpus, "json_sha256", lambda sha256, parts: sha256(parts[:2])), is_slow=True),
    Mutant("runs of letters of any length",
           "tests/tokenization/test_tokenizer.py::test_no_run_is_longer_than_the_limit",
           calls(byte_level_pre_tokenizer, "Regex", lambda regex, pattern: regex(pattern.replace("{1,256}", "+"))),
           is_slow=True),
    # Files
    Mutant("a checkpoint that is not synced before it gets its name",
           "tests/storage/test_crash_points.py::test_dying_at_any_call_leaves_old_or_new",
           calls(NewFile.__exit__, "fsync", lambda system, descriptor: None), is_slow=True),
    Mutant("a file written over the one whose tensors are saved",
           "tests/storage/test_folder.py::test_saving_over_the_files_whose_mapped_tensors_are_saved",
           replaced(leftover_path, lambda path, role:
                    path.with_name(path.name if role == "tmp" else f".{path.name}.old-1-00000000"))),
    Mutant("damaged checkpoints counted among those that stay",
           "tests/storage/test_checkpoints.py::test_random_histories_never_lose_the_last_whole_one",
           calls(prune_checkpoints, "find_damage", lambda *_, ranks: None)),
    # Generation and serving
    Mutant("a filter that may leave no token",
           "tests/generation/test_sampling.py::test_tokens_come_as_often_as_they_should",
           assigned(Sampler._filtered_probabilities, "preceding", lambda preceding, *, probabilities:
                    preceding + probabilities), is_slow=True),
    Mutant("a text that is written on after its reader left",
           "tests/serving/test_service.py::test_a_client_that_waits_for_a_whole_answer_and_goes_away_frees_its_state",
           calls(Engine.cancel, "set", lambda cancelled: None), is_slow=True),
]
# fmt: on
