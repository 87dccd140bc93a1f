"""A state that was saved goes on, in another process, as the original: bit for bit, or refused in one sentence."""

import json
from pathlib import Path

import pytest
import torch

import heddle
from heddle.errors import CheckpointError, ConfigError
from heddle.laws.harness import assert_bitwise_equal, forward_with_state, model_under_test, new_state, random_tokens
from heddle.model.decoder import Decoder
from heddle.model.state import State
from heddle.parts.layout import Layout
from heddle.storage.folder import write_folder
from heddle.storage.model import STATE_FILE, STATE_KIND, STATE_TENSORS_FILE
from tests.cases import CASES, case, each_part
from tests.generation.loops import is_causal

CAUSAL = [name for name in CASES if is_causal(case(name))]


def used(model: Decoder, capacity: int | None = None, layout: Layout | None = None, rewind: int = 0) -> State:
    """A state of three rows that have read nine tokens."""
    return forward_with_state(model, new_state(model, 3, capacity, rewind), random_tokens(model.config, 3, 9), layout)[
        1
    ]


@pytest.mark.parametrize("name", each_part(CAUSAL))
def test_going_on_from_a_loaded_state_is_going_on(name: str, tmp_path: Path) -> None:
    model = model_under_test(case(name))
    again = model_under_test(case(name))
    layouts = (None, Layout.padded([9, 2, 5], side="left"), Layout.packed([[4, 5], [9], [2, 7]]))
    for number, (layout, capacity) in enumerate(zip(layouts, (None, 16, 16), strict=True)):
        state = used(model, capacity, layout)
        heddle.save_state(state, tmp_path / str(number))
        loaded = heddle.load_state(again, tmp_path / str(number))
        assert (loaded.bytes, loaded.fingerprint) == (state.bytes, state.fingerprint)
        for step, length in enumerate((1, 3, 1, 2)):
            tokens = random_tokens(model.config, 3, length, seed=step)
            want, state = forward_with_state(model, state, tokens)
            got, loaded = forward_with_state(again, loaded, tokens)
            assert_bitwise_equal(got, want, f"{length} tokens after a state was loaded")


def test_a_loaded_state_goes_back_as_far_as_the_original(tmp_path: Path) -> None:
    model = model_under_test(case("attention-window-2"))
    state = used(model, rewind=3).rollback([0, 2, 1])
    heddle.save_state(state, tmp_path / "state")
    loaded = heddle.load_state(model, tmp_path / "state")
    assert [loaded.can_roll_back(count) for count in (1, 2)] == [True, False]
    want, _ = forward_with_state(model, state.rollback(1), random_tokens(model.config, 3, 2))
    assert_bitwise_equal(
        forward_with_state(model, loaded.rollback(1), random_tokens(model.config, 3, 2))[0], want, "rows taken back"
    )


@pytest.mark.parametrize("text_lengths", [[3, 30, 12], [3, 30], [3, 0, 30], 3, "abc"])
def test_the_length_of_each_text_is_saved(text_lengths: object, tmp_path: Path) -> None:
    model = model_under_test(case("rope-longrope"))
    state = model.init_state(3, text_lengths=[3, 30, 12])
    _, state = forward_with_state(model, state, random_tokens(model.config, 3, 2))
    heddle.save_state(state, tmp_path / "state")
    fields = json.loads((tmp_path / "state" / STATE_FILE).read_text())
    assert fields["table"].pop("text_lengths") == [3, 30, 12]
    fields["table"]["text_lengths"] = text_lengths
    texts = {STATE_FILE: json.dumps(fields)}
    write_folder(tmp_path / "other", tensors={STATE_TENSORS_FILE: state.tensors()}, documents=texts, kind=STATE_KIND)
    if text_lengths == [3, 30, 12]:
        assert heddle.load_state(model, tmp_path / "other").table.text_lengths == (3, 30, 12)
        return
    with pytest.raises(CheckpointError, match=r"text_lengths|does not describe a state"):
        heddle.load_state(model, tmp_path / "other")


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            lambda: model_under_test(case("attention-gqa")),
            "is a state of another design; load the model that made it",
        ),
        (
            lambda: model_under_test(case("attention-mha"), torch.float32),
            "'layers.0.keys'",
        ),
    ],
)
def test_a_state_of_another_model_is_refused(other: object, says: str, tmp_path: Path) -> None:
    heddle.save_state(used(model_under_test(case("attention-mha"))), tmp_path / "state")
    assert callable(other)
    with pytest.raises(CheckpointError) as caught:
        heddle.load_state(other(), tmp_path / "state")
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/state: ")


def test_another_batch_is_refused_by_the_first_call(tmp_path: Path) -> None:
    model = model_under_test(case("attention-mha"))
    heddle.save_state(used(model), tmp_path / "state")
    loaded = heddle.load_state(model, tmp_path / "state")
    with pytest.raises(ConfigError, match="state:"):
        forward_with_state(model, loaded, random_tokens(model.config, 2, 1))


def test_a_consumed_state_is_not_saved(tmp_path: Path) -> None:
    model = model_under_test(case("attention-mha"))
    state = used(model)
    forward_with_state(model, state, random_tokens(model.config, 3, 1))
    with pytest.raises(ConfigError, match="was consumed"):
        heddle.save_state(state, tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_a_model_is_no_state_and_a_state_no_model(tmp_path: Path) -> None:
    model = model_under_test(case("attention-mha"))
    heddle.save_state(used(model), tmp_path / "state")
    heddle.save(model, tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"'model'.*'state'"):
        heddle.load_state(model, tmp_path / "model")
    with pytest.raises(CheckpointError, match="not a model folder"):
        heddle.load(tmp_path / "state")


def altered(model: Decoder, folder: Path, change: str) -> None:
    """Write an intact folder with a wrong state."""
    state = used(model)
    tensors = state.tensors()
    heddle.save_state(state, folder)
    metadata = json.loads((folder / STATE_FILE).read_text())
    if change in ("max_tokens", "equal_lengths", "lookback"):
        metadata["table"][change] = {"max_tokens": -1, "equal_lengths": 1, "lookback": "all"}[change]
    elif change == "field":
        del metadata["table"]["peak_tokens"]
    elif change == "tensor":
        del tensors["layers.1.keys"]
    elif change == "rows":
        tensors["layers.1.keys"] = tensors["layers.1.keys"][:2]
    elif change == "token_counts":
        del tensors["table.token_counts"]
    else:
        metadata = {"design": 5}
    write_folder(
        folder, tensors={STATE_TENSORS_FILE: tensors}, documents={STATE_FILE: json.dumps(metadata)}, kind=STATE_KIND
    )


@pytest.mark.parametrize(
    "change", ["max_tokens", "equal_lengths", "lookback", "field", "tensor", "rows", "token_counts", "design"]
)
def test_a_state_that_does_not_hold_together_is_refused(change: str, tmp_path: Path) -> None:
    model = model_under_test(case("attention-mha"))
    altered(model, tmp_path / "state", change)
    with pytest.raises(CheckpointError, match="save") as caught:
        heddle.load_state(model, tmp_path / "state")
    assert "\n" not in str(caught.value)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    model = model_under_test(case("attention-mha"))
    heddle.save_state(used(model), tmp_path / "state")
    file = tmp_path / "state" / STATE_TENSORS_FILE
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"state\.safetensors:.*altered"):
        heddle.load_state(model, tmp_path / "state")
