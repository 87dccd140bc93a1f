"""Bugs outside of the parts, each planted in one function, with the test that fails on it.

A bug of a part is planted beside the laws, in `tests/laws/test_planted.py`.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """In the function `target`, the source text `old` becomes `new`. The test `killer` (a node id) must then fail."""

    description: str
    killer: str
    target: str
    old: str
    new: str
    is_slow: bool = False  # killed in `make soak` only


RESUME, STEP, FIRST = (
    "tests/training/test_resume.py",
    "tests/training/test_step.py",
    "tests/training/test_first_non_finite.py",
)
APPLY = "training.step:apply_gradients"

# fmt: off
MUTANTS = [
    # Exchange
    Mutant("keys permuted with the number of query heads",
           "tests/exchange/test_gguf_read.py::test_what_was_written_is_read",
           "exchange.gguf.architectures:_transforms_of",
           '".attn_k.", "num_key_value_heads"', '".attn_k.", "num_attention_heads"', is_slow=True),
    Mutant("the base of the rotary frequencies left out of an export",
           "tests/exchange/test_config_formats.py::test_an_export_says_the_same_to_older_and_newer_readers",
           "exchange.rope:write_rope_table",
           '"rope_theta": rope.base', '"rope_theta": 10000.0', is_slow=True),
    Mutant("the default epsilon in an export",
           "tests/exchange/test_gguf_read.py::test_what_was_written_is_read",
           "exchange.gguf.export:_model_keys",
           'float(config["rms_norm_eps"])', "1e-5", is_slow=True),
    Mutant("1 added twice to norm weights on the way out",
           "tests/exchange/test_gguf_read.py::test_what_was_written_is_read",
           "exchange.gguf.architectures:_transforms_of",
           "partial(torch.add, other=1.0)", "partial(torch.add, other=2.0)", is_slow=True),
    # Numbers
    Mutant("a norm in half precision", "tests/numerics/test_norms.py::test_statistics_are_wide",
           "numerics.norms:reference",
           "wide = at_least_float32(x)", "wide = x"),
    Mutant("a query without keys that sees something",
           "tests/numerics/test_attention.py::test_a_query_without_visible_keys_gives_zeros_and_no_gradient",
           "numerics.attention.softmax:softmax_weights", ".masked_fill(empty[:, 0], 0.0)", ""),
    Mutant("decays as differences of cumulative sums",
           "tests/numerics/test_gated_delta.py::test_a_sudden_strong_decay_costs_no_precision",
           "numerics.recurrent.batched_chunks:head_decays",
           "sums = (log_decay.mT * within[:, :-1]) @ within.to(log_decay.dtype)",
           "ends = functional.pad(log_decay.cumsum(-2), (0, 0, 1, 0)); sums = ends[..., 1:, :] - ends.mT"),
    Mutant("gates from a softmax over all experts instead of the chosen",
           "tests/numerics/test_routing.py::test_formulas",
           "numerics.experts.mixture:route",
           "log_scores.gather(-1, expert_indices).softmax(-1)", "probabilities.gather(-1, expert_indices)"),
    # Training
    Mutant("gradients averaged by the micro-batch",
           f"{STEP}::test_any_split_of_asked_targets_has_the_same_gradients",
           "training.step:accumulate_gradients",
           "targets) / targets_in_batch", "targets) / (len(targets) * len(batch.parts))"),
    Mutant("the auxiliary losses of all layers but the last forgotten",
           "tests/training/test_experts.py::test_loss_and_penalty_are_those_of_plain_autograd",
           "training.step:RouterMetricsCollector.add",
           "aux_loss + share", "share"),
    Mutant("a balancing bias that only the first layer gets",
           "tests/training/test_experts.py::test_each_mixture_is_told_its_loads_once_a_step",
           APPLY, "in batch.router_metrics.items():", "in list(batch.router_metrics.items())[:1]:", is_slow=True),
    Mutant("the order of the first epoch repeated",
           "tests/data/test_samples.py::test_every_epoch_has_another_order",
           "data.samples:epoch_shuffle", "(*key, epoch)", "(*key, 0)", is_slow=True),
    Mutant("a resumed run that begins with the first batch again",
           f"{RESUME}::test_death_at_every_second_step_of_one_run",
           "training.loop:prepared_batches", "def prepare(step: int) -> PreparedBatch:\n",
           "first = []\n\n    def prepare(step):\n        first.append(step)\n        step -= first[0]\n",
           is_slow=True),
    Mutant("the state of the random numbers not restored",
           f"{RESUME}::test_a_checkpoint_holds_the_state_of_the_random_numbers",
           "training.checkpoint:resume_run",
           "torch.set_rng_state(state.training.pop(RANDOM_STATE))", "state.training.pop(RANDOM_STATE)", is_slow=True),
    Mutant("a first step with a learning rate of 0",
           "tests/training/test_settings.py::test_every_step_has_a_rate_above_zero_and_none_above_the_highest",
           "training.settings:scheduled_learning_rate", "(step + 1) / warmup", "step / warmup"),
    Mutant("copies of bfloat16 weights in bfloat16",
           "tests/training/test_master_weights.py::test_small_updates_are_not_lost",
           "training.optimizer:MasterWeights.__init__", "value.detach().float()", "value.detach().clone()",
           is_slow=True),
    Mutant("a gradient that is not finite clipped and applied",
           f"{STEP}::test_a_bad_number_changes_neither_weights_nor_moments",
           APPLY, "if not on_host or bool(result.is_finite):", "if True:"),
    Mutant("an update multiplied by zero instead of left out",
           f"{STEP}::test_a_bad_number_changes_neither_weights_nor_moments",
           APPLY,
           "if not on_host or bool(result.is_finite):\n        nn.utils",
           "learning_rate *= float(result.is_finite)\n    if True:\n        nn.utils", is_slow=True),
    Mutant("moments that are not finite taken for good",
           f"{FIRST}::test_nothing_moves_and_the_place_is_named_wherever_a_number_is_not_finite",
           "training.optimizer:Optimizer.is_finite",
           "(*self.trainable.values(), *moments)", "self.trainable.values()", is_slow=True),
    # Data
    Mutant("the token that ends an answer never learned",
           "tests/data/test_chat.py::test_default_template_and_labels_of_batches",
           "data.chat:ChatFormat._encode_answers", "stop_indices[-1] + 1", "stop_indices[-1]"),
    Mutant("a tokenizer exchanged for another of as many tokens",
           "tests/data/test_corpus.py::test_hash_names_content_weights_and_tokenizer",
           "data.corpus:prepare_corpus", "content, corpus_tokenizer.hash", "content", is_slow=True),
    Mutant("runs of letters of any length",
           "tests/tokenization/test_tokenizer.py::test_no_run_is_longer_than_the_limit",
           "tokenization.backend:byte_level_pre_tokenizer",
           "Regex(_PATTERN)", 'Regex(_PATTERN.replace("{1,256}", "+"))', is_slow=True),
    # Files
    Mutant("a checkpoint that is not synced before it gets its name",
           "tests/storage/test_crash_points.py::test_dying_at_any_call_leaves_old_or_new",
           "storage.file_io:NewFile.__exit__", "system.fsync(self.descriptor)", "pass", is_slow=True),
    Mutant("a file written over the one whose tensors are saved",
           "tests/storage/test_folder.py::test_saving_over_the_files_whose_mapped_tensors_are_saved",
           "storage.file_io:leftover_path",
           'f".{path.name}.{role}-{process}-{secrets.token_hex(4)}"',
           'path.name if role == "tmp" else f".{path.name}.old-1-00000000"'),
    Mutant("damaged checkpoints counted among those that stay",
           "tests/storage/test_checkpoints.py::test_random_histories_never_lose_the_last_whole_one",
           "storage.checkpoints:prune_checkpoints",
           "if find_damage(path, ranks=ranks) is None][keep:]", "][keep:]"),
    # Generation and serving
    Mutant("a filter that may leave no token",
           "tests/generation/test_sampling.py::test_tokens_come_as_often_as_they_should",
           "generation.sampling:Sampler._filtered_probabilities",
           "preceding >= self.top_p", "preceding + probabilities > self.top_p", is_slow=True),
    Mutant("a text that is written on after its reader left",
           "tests/serving/test_service.py::test_a_client_that_waits_for_a_whole_answer_and_goes_away_frees_its_state",
           "serving.engine:Engine.cancel", "job.cancelled.set()", "pass", is_slow=True),
]
# fmt: on
