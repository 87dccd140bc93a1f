"""Running laws: the order of results, messages of violations and other errors, unknown names."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from heddle.errors import ConfigError
from heddle.laws import LAWS, harness, run
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.load_config import load_config
from heddle.model.state import State
from heddle.parts.mixers import merge_heads
from heddle.parts.position_table import PositionTable
from tests.cases import DEFAULTS, attention, case, cross, design, layer
from tests.laws.planting import calls, replaced, wrapped


def test_statements_are_one_sentence() -> None:
    for name, law in LAWS.items():
        assert law.name == name
        assert re.fullmatch(r"[A-Z].{20,118}\.", law.statement), law.statement


def test_results_come_in_the_requested_order() -> None:
    results = list(run(case("attention-gqa"), ["config_round_trip", "chunked_decoding"]))
    assert [(result.name, result.passed, result.message) for result in results] == [
        ("config_round_trip", True, ""),
        ("chunked_decoding", True, ""),
    ]
    assert all(result.seconds > 0 for result in results)


def test_a_result_is_known_before_the_next_law_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    for name in ("tied_head", "causality"):
        note = partial(lambda name, _: checked.append(name), name)
        monkeypatch.setitem(LAWS, name, LAWS[name]._replace(check=note))
    results = run(case("attention-gqa"), ["tied_head", "causality"])
    assert (next(results).name, checked) == ("tied_head", ["tied_head"])
    assert (next(results).name, checked) == ("causality", ["tied_head", "causality"])


def test_each_law_gets_a_model_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["gradient_accumulation", "batch_invariance"]  # the first turns dropout on
    assert [result.passed for result in run(case("attention-dropout"), names)] == [True, True]
    calls(harness.model_under_test, "deepcopy", lambda copy, model, memo: model)(monkeypatch)
    assert [result.passed for result in run(case("attention-dropout"), names)] == [True, False]


def test_laws_of_one_run_share_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[ModelConfig] = []

    def counted_build(config: ModelConfig, **options: Any) -> Decoder:
        built.append(config)
        return build(config, **options)

    monkeypatch.setattr(harness, "build", counted_build)
    assert all(result.passed for result in run(case("attention-gqa"), ["causality", "batch_invariance"]))
    assert built == [case("attention-gqa")]
    model = harness.model_under_test(case("attention-gqa"))
    assert (model.config, len(built)) == (case("attention-gqa"), 2)  # outside of a run nothing is shared


def test_the_error_of_an_unknown_law_suggests_the_nearest() -> None:
    sentence = r"law 'padding_invarance' is unknown; did you mean 'padding_invariance'\? choices: chunked_decoding, "
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        run(case("attention-gqa"), ["padding_invarance"])


def test_a_violation_says_what_differs_and_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    restart = wrapped(
        PositionTable.next_layout, lambda next_layout, table, *rest: next_layout(replace(table, max_tokens=0), *rest)
    )
    restart(monkeypatch)
    (result,) = run(case("attention-gqa"), ["chunked_decoding"])
    assert not result.passed
    message = r"text of 11 in 11 chunks of 1, cache_length None: token \d+ of row [01] differs by \d\.\de.\d\d"
    assert re.fullmatch(message, result.message)


def test_calls_that_must_have_the_same_bits_run_the_same_kernels() -> None:
    """Experts run other kernels with gradients than without."""
    experts = {"kind": "moe", "experts": 12, "top_k": 1, "hidden": 6}
    encoder = DEFAULTS | {"vocab_size": 17, "width": 24, "layers": [layer(attention(3, None), experts)]}
    (result,) = run(load_config(design(layer(cross(12)), encoder=encoder)), ["cross_attention"])
    assert result.message == ""


def test_experts_whose_activations_are_zero_break_no_law() -> None:
    """With one hidden unit and relu, many tokens get zeros from every expert they take."""
    experts = {"kind": "moe", "experts": 2, "top_k": 1, "hidden": 1, "activation": "relu", "bias": False}
    (result,) = run(load_config(design(layer(attention(2), experts))), ["top_k_routing"])
    assert result.message == ""


OF_EXPERTS = (
    "expert_permutation", "top_k_routing", "idle_experts", "routing_ties", "router_statistics", "load_balancing",
    "router_precision",
)  # fmt: skip
OF_STATES = (
    "chunked_decoding", "all_chunkings", "chunked_ragged_batch", "cache_growth", "state_errors",
    "decoding_after_packing", "nan_in_unused_slots", "padding_not_cached", "fork_isolation", "state_row_selection",
    "changing_batch", "state_rollback", "rollback_errors", "rollback_size",
)  # fmt: skip
REFUSED = "the design refuses multi-token modules"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("attention-gqa", dict.fromkeys(OF_EXPERTS, "no experts") | {"selected_keys": "no indexer"}
            | {"cross_attention": "no cross-attention", "dropout_off_in_eval": "no dropout"}),
        ("attention-bidirectional", dict.fromkeys(OF_STATES, "no state, because the design is bidirectional")
            | {"multi_token_prediction": REFUSED}),
        ("moe-hash", dict.fromkeys(("expert_permutation", "routing_ties"), "a hash selects the experts")),
        ("retention-plain", dict.fromkeys(("state_rollback", "rollback_size"), "its state cannot be rolled back")
            | {"rotary_invariants": "no rotary embedding"}),
    ],
)  # fmt: skip
def test_a_law_that_says_nothing_about_a_design_gives_the_reason(name: str, expected: dict[str, str]) -> None:
    results = list(run(case(name), [*expected, "tied_head"]))
    assert all(result.passed and not result.message for result in results)
    assert {result.name: result.not_applicable for result in results} == {**expected, "tied_head": ""}


def test_other_errors_are_reported_as_violations(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(merge_heads, lambda x: torch.flatten(x, 2))(monkeypatch)
    (result,) = run(case("attention-gqa"), ["causality"])
    assert not result.passed
    assert result.message.startswith("stopped by RuntimeError: ")


@pytest.mark.parametrize("is_planted", [False, True])
def test_bool_tensors_of_a_state_are_compared_exactly(is_planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_flags(tensors: Any, state: State) -> dict[str, torch.Tensor]:
        found = tensors(state)
        counts = found["table.token_counts"]
        return found | {"seen": counts > (len(counts) if is_planted else 1)}

    wrapped(State.tensors, with_flags)(monkeypatch)
    (result,) = run(case("attention-gqa"), ["padding_not_cached"])
    assert result.passed == (not is_planted), result.message
    assert result.message.startswith("seen of row ") == is_planted
