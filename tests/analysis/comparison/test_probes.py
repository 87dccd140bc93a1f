"""Recall tasks: the small copy of a design, how it is trained and evaluated, which tasks are trained and drawn."""

import itertools
from typing import Any

import pytest

from heddle.errors import ConfigError
from heddle.lab.compare import probes
from heddle.lab.compare.probes import (
    RECALL_PROBES,
    TaskChoice,
    choose_tasks,
    describe_results,
    interim_tokens,
    keeps_every_token,
    plan_evaluations,
    select_probes,
)
from heddle.model.config import LayerConfig, ModelConfig
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.training.evaluation.scores import EarlyStop
from heddle.training.loop import INTERIM_EVALUATION_TOKENS
from heddle.training.settings import Settings
from heddle.training.step import accumulate_gradients
from tests import small
from tests.analysis.comparison import reports
from tests.analysis.comparison.plain import left_out_sentences, summarize_abilities, window_sentences
from tests.laws.planting import assigned, condition


def layer(window: int | None = None, mixer: bool = True, feedforward: bool = True) -> dict[str, Any]:
    data: dict[str, Any] = {}
    if mixer:
        data["mixer"] = {"kind": "attention", "heads": 2} | ({} if window is None else {"window": window})
    return data | ({"feedforward": {"kind": "mlp", "hidden": 8}} if feedforward else {})


def windows(layers: list[dict[str, Any]], probe: str = "mqar") -> list[tuple[int, Any, bool]]:
    """(repeat, window, whether it has a feed-forward) of each layer of the copy."""

    def summary(config: LayerConfig) -> tuple[int, Any, bool]:
        window = None if config.mixer is None else config.mixer.dump().get("window")
        return config.repeat, window, config.feedforward is not None

    copy = RECALL_PROBES[probe].small_copy(small.config(small.design(layers=layers)))
    return [summary(config) for config in copy.layers]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([layer()], [(1, None, False)]),
        ([{"repeat": 6, **layer()}], [(2, None, False)]),
        ([layer()] * 6, [(2, None, False)]),
        ([{"repeat": 2, "layers": [{"repeat": 5, **layer(4)}, layer()]}], [(1, 4, False), (1, None, False)]),
        ([layer(4), layer(), layer(4)], [(1, 4, False), (1, None, False)]),
        ([layer(4), layer(), layer(2)], [(1, 4, False), (1, None, False), (1, 2, False)]),
        ([layer(), layer(mixer=False)], [(1, None, False)]),
        ([{"repeat": 3, **layer(mixer=False)}], [(2, None, True)]),
    ],
)
def test_runs_are_shortened_and_patterns_are_kept_once(
    layers: list[dict[str, Any]], expected: list[tuple[int, Any, bool]]
) -> None:
    assert windows(layers) == expected


def test_state_tracking_keeps_the_feed_forwards() -> None:
    assert windows([{"repeat": 3, **layer()}], "s5") == [(2, None, True)]


@pytest.mark.parametrize("name", RECALL_PROBES)
def test_every_probe_can_be_trained(name: str) -> None:
    probe = RECALL_PROBES[name]
    settings = probe.settings()
    copy = probe.small_copy(load_config("preset:local_global-tiny"))
    assert copy.vocab_size == probe.task_stream.vocab_size
    assert copy.initialization.std == pytest.approx(128**-0.5)
    loss = accumulate_gradients(build(copy), probe.task_stream.batch(0, 0, 2), (0, 0)).loss
    assert 0 < float(loss) < 20
    assert settings.sequence_length == probe.task_stream.task.length
    assert probe.summary().train_tokens == settings.steps * settings.tokens_per_step


# How much is read on the way: never more than a tenth of what is trained on.

TEXTS = (5, 478, 9_999, 401_483, 401_484, 10_000_000)  # tokens


def batches_read(settings: Settings, text_tokens: int) -> int:
    """How many batches the training loop reads at one evaluation, as `TextData.validation_batches` chooses them."""
    batches = -(-text_tokens // settings.tokens_per_step)
    step = max(1, batches * settings.tokens_per_step // interim_tokens(settings, text_tokens))
    return len(range(0, batches, step))


def check_share(batch_size: int, length: int) -> None:
    for steps in [*range(1, 300), 1000, 12_345]:
        settings = Settings(steps=steps, batch_size=batch_size, sequence_length=length)
        interval, batches = plan_evaluations(steps, settings.tokens_per_step)
        if interval is None:
            assert (steps < 10, batches) == (True, 0)
            continue
        points = sum(1 for step in range(1, steps + 1) if step % interval == 0 or step == steps)
        assert 1 <= points <= probes.MAX_POINTS
        assert points * batches <= steps / 10
        assert batches == 1 or batches * settings.tokens_per_step <= INTERIM_EVALUATION_TOKENS
        for text_tokens in TEXTS:
            assert batches_read(settings, text_tokens) <= batches


@pytest.mark.parametrize(("batch_size", "length"), list(itertools.product((1, 4, 32), (16, 256))))
def test_evaluations_read_at_most_a_tenth_of_what_is_trained(batch_size: int, length: int) -> None:
    check_share(batch_size, length)


@pytest.mark.parametrize(("name", "value"), [("MAX_SHARE", 0.2), ("INTERIM_EVALUATION_TOKENS", 2**15)])
def test_a_larger_share_would_be_noticed(name: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, name, value)
    with pytest.raises(AssertionError):
        check_share(4, 256)


def test_the_default_budget_has_a_curve() -> None:
    steps = 100_000 // (4 * 256)
    interval, batches = plan_evaluations(steps, 4 * 256)
    assert (interval, batches) == (11, 1)


def test_probes_are_evaluated_alike() -> None:
    for probe in RECALL_PROBES.values():
        settings, evaluation = probe.settings(), probe.evaluation()
        assert settings.evaluate_every == 45
        assert evaluation.interim_tokens is not None
        assert 10 * evaluation.interim_tokens <= settings.steps * settings.tokens_per_step / 10
        assert evaluation.solved_accuracy == 0.995


# Which tasks are trained and drawn: the rules, on designs and invented results.

LONG_TRAINING = 1e9  # tokens: every task is affordable


def design(**mixer: Any) -> ModelConfig:
    data = small.design(vocab_size=300)
    data["layers"] = [{"mixer": {"heads": 2, **mixer}, "feedforward": {"kind": "mlp", "hidden": 8}}]
    return small.config(data)


def full(**fields: Any) -> ModelConfig:
    return design(kind="attention", position={"kind": "rope"}, **fields)


def recurrent() -> ModelConfig:
    return design(kind="linear_attention", head_dim=8, feature_map="elu")


def reasons(train_tokens: float = LONG_TRAINING, **configs: ModelConfig) -> dict[str, str]:
    return {choice.probe: choice.reason for choice in choose_tasks(configs, ("auto",), train_tokens)}


def test_designs_that_keep_all_tokens_are_not_tested() -> None:
    assert keeps_every_token(full(), 36)
    assert keeps_every_token(full(window=36), 36)
    assert not keeps_every_token(full(window=8), 36)
    assert not keeps_every_token(recurrent(), 36)
    alike = reasons(a=full(), b=full(kv_heads=1))
    assert set(alike) == set(RECALL_PROBES)
    assert alike["mqar"] == "in every design a layer keeps all tokens of a sequence"
    assert all(alike.values())
    # a window that hides tokens, or a state of fixed size, may differ
    for other in (full(window=8), recurrent()):
        mixed = reasons(a=full(), b=other)
        assert [name for name, reason in mixed.items() if not reason] == [n for n in RECALL_PROBES if n != "s5"]
        assert mixed["s5"] == "no kind of mixer learns it within this budget"


def test_equal_copies_are_trained_once() -> None:
    wide = full(window=8).replace(layers=tuple(layer.replace(feedforward=None) for layer in full(window=8).layers))
    choices = {choice.probe: choice for choice in choose_tasks({"a": full(window=8), "b": wide}, ("auto",), 1e9)}
    assert choices["mqar"].reason == "the small copies of all designs are equal"  # they have no feed-forwards
    assert not choices["parity"].reason
    assert choices["parity"].copies == {"a": "a", "b": "b"}
    three = {"a": full(window=8), "b": wide, "c": recurrent()}
    [choice] = [choice for choice in choose_tasks(three, ("auto",), 1e9) if choice.probe == "mqar"]
    assert (choice.copies, choice.reason) == ({"a": "a", "b": "a", "c": "c"}, "")


def test_windows_that_hide_nothing_make_equal_copies() -> None:
    """A row of MQAR has 36 tokens, one of the needle task 128."""
    wide = full(window=36)
    alternating = full().replace(layers=(*wide.layers, *full().layers))
    designs = {"full": full(), "wide": wide, "alternating": alternating, "narrow": full(window=35), "elu": recurrent()}
    choices = {choice.probe: choice for choice in choose_tasks(designs, ("auto",), 1e9)}
    deep = full().replace(layers=tuple(layer.replace(repeat=2) for layer in full().layers))
    assert choices["mqar"].copies == {"full": "full", "wide": "full"} | {
        name: name for name in ("alternating", "narrow", "elu")
    }
    assert choices["needle"].copies["wide"] == "wide"
    [mqar] = choose_tasks({"deep": deep, "alternating": alternating}, ("mqar",), 1e9)
    assert mqar.copies == {"deep": "deep", "alternating": "deep"}
    assert reasons(full=full(), wide=wide)["mqar"] == (
        "the small copies of all designs are equal: their windows hide none of its 36 tokens"
    )


def test_a_short_training_affords_short_rows_only() -> None:
    affordable = reasons(300_000, a=full(), b=recurrent())
    assert not affordable["mqar"]
    assert affordable["parity"] == "all tests together may read at most 2 times a design's training tokens"
    tested = [name for name, reason in reasons(500_000, a=full(), b=recurrent()).items() if not reason]
    assert tested == ["mqar", "parity"]  # 0.5 and 0.5 million tokens; the others have longer rows
    assert not reasons(a=full(), b=recurrent())["needle"]


def test_a_budget_that_is_spent_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assigned(choose_tasks, "affordable", lambda spent: 0, nth=1)(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_short_training_affords_short_rows_only()


def test_requested_tasks_are_always_trained() -> None:
    for choice in choose_tasks({"a": full(), "b": full(kv_heads=1)}, select_probes("all"), 10):
        assert choice.reason == ""


@pytest.mark.parametrize(
    ("accuracies", "outcome"),
    [
        ({"a": 1.0, "b": 0.1}, ""),
        ({"a": 0.6, "b": 0.4}, ""),
        ({"a": 1.0, "b": 0.97}, "every design learned it (97 % to 100 %)"),
        ({"a": 1.0, "b": 1.0}, "every design learned it (100 %)"),
        ({"a": 0.1, "b": 0.12}, "no design learned it within the budget (10 % to 12 %, guessing 8.3 %)"),
        ({"a": 0.5, "b": 0.52}, "all designs score alike (50 % to 52 %, guessing 8.3 %)"),
        ({"a": 1.0, "b": None}, ""),
        ({"a": 1.0}, ""),
    ],
)
def test_only_what_tells_designs_apart_is_drawn(accuracies: dict[str, float | None], outcome: str) -> None:
    assert describe_results(accuracies, 1 / 12) == outcome


def report_of(is_auto: bool = True) -> dict[str, Any]:
    choices = [TaskChoice("mqar", {}), TaskChoice("parity", {}), TaskChoice("s5", {}, "it is too hard")]
    results = {"a": {"mqar": 1.0, "parity": 0.5}, "b": {"mqar": 0.1, "parity": 0.51}}
    designs = [
        {"name": name, "recall": {probe: {"accuracy": value} for probe, value in measured.items()}}
        for name, measured in results.items()
    ]
    recall = {design["name"]: design["recall"] for design in designs}
    drawn, left_out = summarize_abilities(choices, recall, is_auto)
    return {"designs": designs, "recall": drawn, "recall_left_out": left_out}


def test_the_report_has_what_is_drawn_and_why_the_rest_is_not() -> None:
    report = report_of()
    assert list(report["recall"]) == ["mqar"]
    assert [(row["name"], row["accuracies"]) for row in report["recall_left_out"]] == [
        ("parity", {"a": 0.5, "b": 0.51}),
        ("s5", {}),
    ]
    assert left_out_sentences(report) == [
        "Parity: tested, not plotted, because no design learned it within the budget (50 % to 51 %, guessing 50 %).",
        "S5: not tested, because it is too hard.",
    ]
    assert list(report_of(is_auto=False)["recall"]) == ["mqar", "parity"]
    # what is not finished is not judged
    report["designs"][0]["recall"] = {}
    recall = {design["name"]: design["recall"] for design in report["designs"]}
    drawn, left_out = summarize_abilities([TaskChoice("parity", {})], recall, is_auto=True)
    assert (list(drawn), left_out) == (["parity"], [])


def test_a_task_that_the_budget_cut_shows_what_is_finished() -> None:
    reason = "the budget of 3 min ended first"
    recall = {"a": {"mqar": {"accuracy": 0.98}}, "b": {}}
    drawn, left_out = summarize_abilities([TaskChoice("mqar", {}, reason)], recall, is_auto=True)
    assert drawn == {}
    assert left_out[0]["accuracies"] == {"a": 0.98, "b": None}
    report = {"designs": [{"name": "a"}, {"name": "b"}], "recall": {}, "recall_left_out": left_out}
    assert left_out_sentences(report) == [f"MQAR: finished only for a, 98 % correct, because {reason}."]


def test_a_window_that_a_task_cannot_show_is_said() -> None:
    report = report_of()
    for row, windows in zip(report["designs"], ([512], [8, 512]), strict=True):
        row["windows"] = windows
    assert window_sentences(report) == [
        "a: its window of 512 hides none of the 36 tokens of MQAR, which therefore says nothing about the window."
    ]


def test_several_tasks_may_be_named() -> None:
    assert select_probes("auto") == ("auto",)
    assert select_probes("none") == ()
    assert select_probes("all") == tuple(RECALL_PROBES)
    assert select_probes("mqar,parity") == ("mqar", "parity")
    for names in ("mqar,mqar", "auto,mqar", "all,none", "none,s5", "auto,curve"):
        with pytest.raises(ConfigError, match=f"recall {names}:"):
            select_probes(names)
    with pytest.raises(ConfigError, match=r"recall al:.*'all'"):
        select_probes("al")


def early_stop(accuracies: list[float], interval: int = 45) -> tuple[int, bool] | None:
    """(the step at which a probe's training ends, whether it is hopeless)."""
    check = EarlyStop(RECALL_PROBES["mqar"].evaluation())
    for number, accuracy in enumerate(accuracies, 1):
        check.add({"step": interval * number, "validation_accuracy": accuracy})
        if check.is_over:
            return interval * number, check.is_hopeless
    return None


def test_a_training_ends_where_the_task_is_solved_or_hopeless() -> None:
    assert early_stop([0.1, 0.99, 1, 1, 1]) == (180, False)
    assert early_stop([0.1, 1, 0.9, 1, 1]) == (225, False)
    assert early_stop([0.08] * 10) == (315, True)
    assert early_stop([0.08] * 5 + [0.3] * 5) is None  # it learns late


def test_hopeless_only_late(monkeypatch: pytest.MonkeyPatch) -> None:
    condition(EarlyStop.add, "hopeless_steps", True)(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_training_ends_where_the_task_is_solved_or_hopeless()


def test_the_terminal_says_what_is_not_drawn() -> None:
    report = reports.make_report() | {"recall_left_out": report_of()["recall_left_out"]}
    text = reports.printed(report, 300)
    assert "S5: not tested, because it is too hard." in text
    assert "20.8–" in text  # the range of a speed
    assert "21.8 k" in text
