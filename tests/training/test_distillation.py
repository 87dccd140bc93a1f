"""Distillation: the plain loop's gradients, any split of a batch, a frozen teacher, an exact resume."""

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from heddle.cli.main import run_command
from heddle.data.corpus import Corpus
from heddle.data.samples import Batch
from heddle.errors import CheckpointError, ConfigError
from heddle.model.decoder import Decoder, build
from heddle.numerics.cross_entropy import step_in_place
from heddle.parts.layout import Layout
from heddle.storage.checkpoints import checkpoint_folder
from heddle.storage.folder import tensors_sha256
from heddle.storage.model import load, save
from heddle.storage.run_log import RUN_FILE, read_log
from heddle.training import loop
from heddle.training.distillation import Distillation, LossWeights, Teacher, TeacherResult
from heddle.training.init_checkpoint import open_init_checkpoint
from heddle.training.job import TrainingJob
from heddle.training.loop import train
from heddle.training.optimizer import build_optimizer
from heddle.training.step import BatchResult, accumulate_gradients, apply_gradients
from tests import small
from tests.laws.planting import Plant, calls, constant, wrapped
from tests.storage.shared import Died, untimed_log
from tests.training.gradients import KEY, batch, furthest, gradients_of
from tools.kill_test import ending, killed, moments, undisturbed

MIXED = LossWeights(logits=0.7, text=0.2, layers=3.0)


def wide_teacher(dtype: torch.dtype = torch.float64, **fields: Any) -> Decoder:
    """Two layers of other mixers than the student's, with dropout that evaluation must switch off."""
    data = small.dropping() | {"width": 24} | fields
    return build(small.config(data), dtype=dtype, seed=8).train()


def student(data: dict[str, Any] | None = None, dtype: torch.dtype = torch.float64) -> Decoder:
    return build(small.config(data or small.design()), dtype=dtype, seed=3).train()


def asked(batch: Batch) -> Batch:
    """Some scored targets, unevenly many in each row."""
    draw = np.random.default_rng(2)
    labels = np.where(draw.random(batch.targets.shape) < 0.7, -1, batch.targets)
    labels[1] = -1
    return dataclasses.replace(batch, labels=labels)


def taught(model: Decoder, teacher: Teacher, rows: Batch, parts: int = 1) -> dict[str, Tensor]:
    """The gradients of a batch and its losses, by name."""
    gradients, result = gradients_of(model, rows, parts, teacher)
    return gradients | {"loss": result.loss, "aux_loss": result.aux_loss, **result.distillation}


# The oracle: torch's own functions and optimizer


def plain_loss(model: Decoder, teacher: Decoder, tokens: Tensor, weights: LossWeights) -> Tensor:
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    with torch.no_grad():
        q = torch.softmax(teacher.head(teacher(inputs)[0]), -1)
    logits = model.head(model(inputs)[0])
    divergence = functional.kl_div(torch.log_softmax(logits, -1).flatten(0, 1), q.flatten(0, 1), reduction="batchmean")
    return weights.logits * divergence + weights.text * functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten()
    )


def three_steps(dtype: torch.dtype) -> float:
    """How far apart the weights are after three steps of heddle and of the plain loop, relative to their norm."""
    weights, models = LossWeights(logits=0.7, text=0.3), [student(dtype=dtype), student(dtype=dtype)]
    teacher = wide_teacher(dtype).eval()
    adamw = torch.optim.AdamW(models[0].parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    ours, guide = build_optimizer(models[1], 0.0), Teacher(copy.deepcopy(teacher), weights)
    for number in range(3):
        tokens = np.random.default_rng(number).integers(0, small.VOCABULARY, (4, 13))
        loss = plain_loss(models[0], teacher, torch.from_numpy(tokens), weights)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(models[0].parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        batch = Batch(tokens, ((12,),) * 4, np.arange(4))
        apply_gradients(models[1], ours, accumulate_gradients(models[1], batch, KEY, 2, teacher=guide), 3e-4, 1.0)
    plain, heddles = (torch.nn.utils.parameters_to_vector(model.parameters()).detach() for model in models)
    return float((heddles - plain).norm() / plain.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_three_steps_equal_those_of_a_plain_loop(dtype: torch.dtype, tolerance: float) -> None:
    assert three_steps(dtype) <= tolerance


def reversed_divergence(gradient: Tensor, q: Tensor, alpha: float, *, text_weight: float) -> Tensor:
    """In the place of p (w + α) − α q: the gradient of KL(p, q)."""
    p = gradient / (text_weight + alpha)
    ratio = (p / q).log()
    return gradient.copy_(p * (text_weight + alpha * (ratio - (p * ratio).sum(1, keepdim=True))))


PLANTED = {
    "divergence reversed": calls(step_in_place, "sub_", reversed_divergence, nth=2),
    "teacher in training mode": calls(Teacher.__init__, "eval", lambda model: model.train()),
    "mean over the wrong count": calls(
        TeacherResult.sums,
        "distillation_sums",
        lambda sums, hidden, head, targets, output, text, logits: sums(
            hidden, head, targets, output, text / len(targets), logits
        ),
    ),
    "text weight forgotten": calls(
        TeacherResult.sums, "distillation_sums", lambda sums, *inputs: sums(*inputs[:4], 1.0, inputs[5])
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[bug](monkeypatch)
    assert three_steps(torch.float64) > 1e-8


def test_each_layer_learns_from_what_enters_the_teachers_layer() -> None:
    """The layer loss by hand: one layer at a time on the teacher's stream."""
    model, original = student(small.dropping()).eval(), wide_teacher(width=16).eval()
    rows = batch(((12,),) * 4)
    ours = taught(model, Teacher(original, LossWeights(logits=0.0, layers=1.0), (1,)), rows)
    with torch.no_grad():
        stream = original.embed(torch.from_numpy(rows.tokens[:, :-1]), layout := Layout.packed(rows.doc_lengths))
        entering, _ = original.layers[0](stream, layout)
        leaving, _ = original.layers[1](entering, layout)
    error = (model.layers[1](entering, layout)[0] - leaving).square().mean()
    names = [f"layers.1.{name}" for name, _ in model.layers[1].named_parameters()]
    plain = torch.autograd.grad(error, list(model.layers[1].parameters()))
    assert float(ours.pop("layer_error")) == pytest.approx(float(error.detach()), abs=1e-12)
    assert {name for name in ours if name.startswith("layers")} == set(names)
    assert "embed.weight" not in ours
    assert furthest({name: ours[name] for name in names}, dict(zip(names, plain, strict=True))) <= 1e-10


# Any split of a batch


@pytest.mark.parametrize("scored", [lambda batch: batch, asked], ids=["text", "asked"])
@pytest.mark.parametrize("parts", [2, 4])
def test_any_split_of_a_batch_has_the_same_gradients(parts: int, scored: Callable[[Batch], Batch]) -> None:
    model = student(small.dropping())
    teacher = Teacher(wide_teacher(width=16), MIXED, (0, 1))
    whole = taught(model, teacher, scored(batch()))
    assert {"divergence", "layer_error"} <= whole.keys()
    assert furthest(whole, taught(model, teacher, scored(batch()), parts)) <= 1e-12
    model.checkpointing = True
    assert furthest(whole, taught(model, teacher, scored(batch()), parts)) <= 1e-12


@pytest.mark.parametrize(
    "plant",
    [
        wrapped(Teacher.read, lambda read, *inputs: read(*inputs[:4], inputs[2].numel())),
        calls(
            accumulate_gradients,
            "sums",
            lambda taught, hidden, head, targets, scored, *, targets_in_batch: (
                total * targets_in_batch / len(targets) for total in taught.sums(hidden, head, targets, scored)
            ),
        ),
    ],
    ids=["of the layers", "of the text"],
)
def test_a_mean_over_the_part_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    model, teacher = student(small.dropping()), Teacher(wide_teacher(width=16), MIXED, (0, 1))
    assert furthest(taught(model, teacher, batch()), taught(model, teacher, batch(), 2)) > 1e-6


def test_experts_keep_their_losses_and_the_teachers_do_not_count() -> None:
    data = small.dropping()
    data["layers"][0]["feedforward"] = small.MOE
    model = student(data)
    plain = accumulate_gradients(model, batch(), KEY)
    result = accumulate_gradients(model, batch(), KEY, 2, teacher=Teacher(wide_teacher(layers=data["layers"]), MIXED))
    assert float(plain.aux_loss) > 0
    assert float(result.aux_loss) == pytest.approx(float(plain.aux_loss), abs=1e-12)
    for path, metrics in plain.router_metrics.items():
        assert torch.equal(metrics.expert_counts, result.router_metrics[path].expert_counts)


def leaks(original: Decoder) -> bool:
    """Whether a step gives the teacher gradients, or changes it."""
    before, model = copy.deepcopy(original), student(small.dropping())
    teacher = Teacher(original, MIXED, (1,))
    optimizer = build_optimizer(model, 0.1)
    apply_gradients(model, optimizer, accumulate_gradients(model, batch(), KEY, teacher=teacher), 1e-2, 1.0)
    assert not original.training
    same = all(torch.equal(a, b) for a, b in zip(original.parameters(), before.parameters(), strict=True))
    return not same or any(x.grad is not None for x in original.parameters())


def test_the_teacher_gets_no_gradient_and_keeps_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not leaks(wide_teacher(width=16))
    constant(Teacher.__init__, False, True)(monkeypatch)
    assert not leaks(wide_teacher(width=16))  # each of the two is enough
    calls(Teacher.read, "no_grad", lambda torch: torch.enable_grad())(monkeypatch)
    assert leaks(wide_teacher(width=16))


def test_a_model_equal_to_its_teacher_has_no_divergence_and_learns_nothing() -> None:
    model = student()
    gradients = taught(model, Teacher(student(), LossWeights(), (0,)), batch())
    losses = {name: float(gradients.pop(name)) for name in ("loss", "aux_loss", "divergence", "layer_error")}
    assert abs(losses["divergence"]) <= 1e-12
    assert losses["layer_error"] <= 1e-24
    assert max(float(x.abs().max()) for x in gradients.values()) <= 1e-12


def test_a_divergence_that_is_not_finite_skips_the_step() -> None:
    model = student()
    accumulate_gradients(model, batch(), KEY)
    bad = BatchResult(torch.tensor(1.0), distillation={"divergence": torch.tensor(float("nan"))})
    assert apply_gradients(model, build_optimizer(model, 0.1), bad, 1e-3, 1.0).skipped


# Runs


@pytest.fixture(scope="module")
def teacher_folder(texts: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps."""
    out = tmp_path_factory.mktemp("teacher")
    train(small.job(texts, out, small.dropping(), steps=4))
    return out


def job(texts: Corpus, out: Path, teacher: Path, weights: LossWeights = MIXED, **settings: Any) -> TrainingJob:
    """A student of the teacher's design with one pair of keys and values."""
    data = small.dropping()
    data["layers"][0]["mixer"]["kv_heads"] = 1
    values = {"steps": 7, "save_every": 2, "gradient_accumulation_steps": 2} | settings
    plain = small.job(texts, out, data, **values)
    return dataclasses.replace(plain, distillation=Distillation(open_init_checkpoint(teacher), weights))


def test_a_distillation_stopped_and_resumed_has_the_same_bits(
    texts: Corpus, tmp_path: Path, teacher_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.same_after_a_signal(lambda name: job(texts, tmp_path / name, teacher_folder), monkeypatch)
    lines = [untimed_log(tmp_path / name) for name in ("whole", "cut")]
    assert lines[0] == lines[1]
    assert all(min(line["divergence"], line["layer_error"], line["loss"]) > 0 for line in lines[0])
    assert {path.name for path in checkpoint_folder(tmp_path / "cut", 7).iterdir()} == {
        "config.json", "manifest.json", "model.safetensors", "tokenizer.json", "training.json", "training.safetensors",
    }  # fmt: skip


def test_the_command_trains_towards_a_teacher(teacher_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """With the teacher's vocabulary and tokenizer, killed once and continued."""
    command = [
        "train", str(small.design_file(tmp_path / "design.yaml", small.design() | {"vocab_size": None})), "--quiet",
        "--data", str(small.folder(tmp_path / "text")), "--distill", str(teacher_folder),
        "--distill-loss", "logits=0.9,text=0.1", "--steps", "5", "--batch-size", "2", "--sequence-length", "16",
        "--save-every", "2",
    ]  # fmt: skip
    assert run_command([*command, "--out", str(tmp_path / "whole")]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_stop_if_diverged", dying_at(3))
        with pytest.raises(Died):
            run_command([*command, "--out", str(tmp_path / "cut")])
    assert run_command([*command, "--out", str(tmp_path / "cut")]) == 0
    folders = [checkpoint_folder(tmp_path / name, 5) for name in ("whole", "cut")]
    assert tensors_sha256(folders[0]) == tensors_sha256(folders[1])
    assert load(folders[0])[0].config.vocab_size == small.VOCABULARY
    assert json.loads((tmp_path / "whole" / RUN_FILE).read_text())["distillation"]["weights"] == {
        "logits": 0.9, "text": 0.1, "layers": 0.0,
    }  # fmt: skip


@pytest.mark.soak
def test_kills(teacher_folder: Path, tmp_path: Path) -> None:
    """Real processes, really killed at random moments."""
    design, data = small.design_file(tmp_path / "design.yaml", small.dropping()), small.folder(tmp_path / "text")
    options = [
        str(design), "--data", str(data), "--distill", str(teacher_folder), "--distill-loss", "logits,layers=2",
        "--sequence-length", "32", "--batch-size", "4", "--steps", "30", "--save-every", "4", "--threads", "1", "-q",
    ]  # fmt: skip
    starting = undisturbed(options, tmp_path / "whole")
    assert killed(options, tmp_path / "cut", moments(6, 30, starting, seed=1))
    assert ending(tmp_path / "cut", 30) == ending(tmp_path / "whole", 30)


def dying_at(step: int) -> Callable[..., None]:
    def stop(job: TrainingJob, state: Any, last: Any) -> None:
        if state.progress.step == step:
            raise Died

    return stop


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--distill-loss", "text"], "--distill-loss text: needs a teacher; give --distill too"),
        (["--distill", "TEACHER", "--distill-loss", "hidden"], "unknown loss 'hidden'; choices: logits, text, layers"),
        (["--distill", "TEACHER", "--distill-loss", "text=x"], "the weight of text must be a number of at least 0"),
        (
            ["--distill", "TEACHER", "--vocab-size", "300"],
            "--distill comes with its own tokenizer; leave --vocab-size out",
        ),
    ],
)
def test_a_mistaken_command_is_one_sentence(
    teacher_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    options = [str(teacher_folder) if option == "TEACHER" else option for option in options]
    out = tmp_path / "run"
    assert run_command(["train", "preset:gqa-tiny", "--out", str(out), "--quiet", *options]) == 2
    assert capsys.readouterr().err.endswith(f"{sentence}\n")
    assert not out.exists()


@pytest.mark.parametrize("change", ["teacher", "weights", "parameters"])
def test_a_run_never_changes_its_teacher(texts: Corpus, tmp_path: Path, teacher_folder: Path, change: str) -> None:
    first = job(texts, tmp_path / "run", teacher_folder, steps=1)
    train(first)
    assert first.distillation is not None
    if change == "teacher":
        train(small.job(texts, tmp_path / "other", small.dropping(), steps=1))
        changed = dataclasses.replace(first.distillation, teacher=open_init_checkpoint(tmp_path / "other"))
    elif change == "weights":
        changed = dataclasses.replace(first.distillation, weights=LossWeights())
    else:
        changed = dataclasses.replace(first.distillation, parameters="touched")
    with pytest.raises(CheckpointError, match=rf"distillation\.{change}"):
        train(dataclasses.replace(first, distillation=changed))
    with pytest.raises(CheckpointError, match="holds another run: distillation was"):
        train(dataclasses.replace(first, distillation=None))


def test_touched_parameters_alone_learn(texts: Corpus, tmp_path: Path, teacher_folder: Path) -> None:
    """The whole mixer in which a weight differs, and nothing else."""
    model, tokenizer = load(teacher_folder)
    with torch.no_grad():
        model.get_parameter("layers.1.mixer.q.weight").mul_(1.5)
    save(model, tmp_path / "converted", tokenizer)
    start = open_init_checkpoint(tmp_path / "converted")
    distillation = Distillation(open_init_checkpoint(teacher_folder), LossWeights(layers=1.0), "touched")
    plain = small.job(texts, tmp_path / "run", small.dropping(), 3)
    assert changed_by(dataclasses.replace(plain, init_checkpoint=start, distillation=distillation)) == {
        f"layers.1.mixer.{name}.weight" for name in "qkv"
    } | {"layers.1.mixer.out.weight"}
    first, *_, last = read_log(tmp_path / "run")
    assert 0 < last["layer_error"] < first["layer_error"]


def test_a_mixer_of_another_design_is_touched(texts: Corpus, tmp_path: Path, teacher_folder: Path) -> None:
    """A window changes no weight. Only layers are compared, so nothing else has a gradient."""
    start = open_init_checkpoint(teacher_folder)
    data = small.dropping()
    data["layers"] = [data["layers"][0] | {"repeat": 1}] * 2
    data["layers"][1] = data["layers"][1] | {"mixer": data["layers"][1]["mixer"] | {"window": 4}}
    plain = small.job(texts, tmp_path / "run", data, 3)
    distillation = Distillation(start, LossWeights(logits=0.0, layers=1.0), "touched")
    changed = changed_by(dataclasses.replace(plain, init_checkpoint=start, distillation=distillation))
    assert {name.rpartition(".")[0].rpartition(".")[0] for name in changed} == {"layers.1.mixer"}


def changed_by(run: TrainingJob) -> set[str]:
    """The parameters that a run changed."""
    before = dict(run.build_model().named_parameters())
    return {name for name, x in train(run).model.named_parameters() if not torch.equal(x, before[name])}


def other_vocabulary(texts: Corpus, folder: Path) -> Path:
    save(build(small.config(small.design() | {"vocab_size": 310})), folder, texts.tokenizer)
    return folder


def no_tokenizer(texts: Corpus, folder: Path) -> Path:
    save(build(small.config()), folder)
    return folder


def an_encoder(texts: Corpus, folder: Path) -> Path:
    mixers = [{"kind": "attention", "heads": 2}, {"kind": "cross_attention", "heads": 2, "encoder_width": 16}]
    layers = [{"mixer": mixer, "feedforward": None} for mixer in mixers]
    save(build(small.config(small.design(layers=layers))), folder, texts.tokenizer)
    return folder


REFUSED: dict[str, tuple[Callable[[Corpus, Path], Path], LossWeights]] = {
    r"310 tokens.*300": (
        other_vocabulary, LossWeights()),
    "its tokenizer": (no_tokenizer, LossWeights()),
    "encoder output": (an_encoder, LossWeights()),
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_teacher_that_does_not_fit_is_refused(texts: Corpus, tmp_path: Path, sentence: str) -> None:
    make, weights = REFUSED[sentence]
    with pytest.raises(ConfigError, match=sentence):
        train(job(texts, tmp_path / "run", make(texts, tmp_path / "teacher"), weights))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("field", ["depth", "width"])
def test_layers_of_another_model_are_refused(texts: Corpus, tmp_path: Path, teacher_folder: Path, field: str) -> None:
    data = small.design(width=32) if field == "width" else small.design()
    if field == "width":
        data["layers"] *= 2
    plain = small.job(texts, tmp_path / "run", data)
    distillation = Distillation(open_init_checkpoint(teacher_folder), LossWeights(layers=1.0))
    with pytest.raises(ConfigError, match=f"loss layers: {field} differs"):
        train(dataclasses.replace(plain, distillation=distillation))


@pytest.mark.parametrize(("weights", "parameters"), [(LossWeights(layers=1.0), "all"), (LossWeights(), "touched")])
def test_nothing_to_heal_is_refused(
    texts: Corpus, tmp_path: Path, teacher_folder: Path, weights: LossWeights, parameters: str
) -> None:
    start = open_init_checkpoint(teacher_folder)
    plain = small.job(texts, tmp_path / "run", small.dropping())
    with pytest.raises(ConfigError, match=r"equals? "):
        train(dataclasses.replace(plain, init_checkpoint=start, distillation=Distillation(start, weights, parameters)))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: LossWeights(logits=-1.0), "loss logits=-1:"),
        (lambda: LossWeights(logits=0.0), r"loss:.*weight is 0"),
    ],
)
def test_weights_that_mean_nothing_are_refused(make: Callable[[], LossWeights], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()
