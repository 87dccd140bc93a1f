"""The loss beside the progress bar: smoothed over steps, and not disturbed by a step that was skipped."""

import pytest

from heddle.storage.run_log import LOSS_DECAY, SmoothedLoss, step_speed


def test_the_loss_is_smoothed_over_the_last_steps() -> None:
    loss = SmoothedLoss()
    assert (
        loss.note({"step": 1, "loss": 9.0, "bits_per_byte": 4.0})
        == "training loss 4.000 bits per byte (last ~10 steps)"
    )
    expected = (2.0 + LOSS_DECAY * 4.0) / (1 + LOSS_DECAY)
    assert (
        loss.note({"step": 2, "loss": 9.0, "bits_per_byte": 2.0})
        == f"training loss {expected:.3f} bits per byte (last ~10 steps)"
    )
    for step in range(3, 200):
        text = loss.note({"step": step, "loss": 9.0, "bits_per_byte": 1.0 if step % 2 else 1.5})
    assert float(text.split()[2]) == pytest.approx(1.25, abs=0.02)


def test_with_a_teacher_the_losses_towards_it_are_named() -> None:
    """The bits per byte are the text's, which a distillation of logits or layers does not lower itself."""
    loss = SmoothedLoss()
    line = {"step": 1, "loss": 9.0, "bits_per_byte": 4.0, "divergence": 0.5, "layer_error": 0.0125}
    named = "KL from the teacher {} nats per token, layer error 0.0125, text loss 4.000 bits per byte (last ~10 steps)"
    assert loss.note(line) == named.format("0.500")
    smoothed = (0.25 + LOSS_DECAY * 0.5) / (1 + LOSS_DECAY)
    assert loss.note(line | {"step": 2, "divergence": 0.25}) == named.format(f"{smoothed:.3f}")


def test_a_skipped_step_is_named_and_leaves_the_loss_as_it_was() -> None:
    loss = SmoothedLoss()
    loss.note({"step": 1, "loss": 2.0})
    assert loss.note({"step": 2, "loss": None}) == "step 2 skipped: its loss is not finite"
    assert loss.note({"step": 3, "loss": 2.0}) == "training loss 2.000 nats per answer (last ~10 steps)"


def test_the_speed_is_that_of_the_median_step_without_the_first() -> None:
    assert step_speed(100, [10.0, 1.0, 4.0, 2.0]) == 50.0
    assert step_speed(100, [10.0, 1.0, 4.0, 2.0], last=1) == 50.0
    assert step_speed(100, [10.0, 1.0, 4.0], last=2) == 40.0
    assert step_speed(100, [10.0]) == 10.0
