"""Healing: train a converted model towards the original, in the loop that trains every model.

The loss is the KL from the original's next-token distribution, as in X-EcoMLA (Li et al. 2025,
https://arxiv.org/abs/2503.11132), the cross-entropy of the text, as for GQA (Ainslie et al. 2023,
https://arxiv.org/abs/2305.13245) and MHA2MLA (Ji et al. 2025, https://arxiv.org/abs/2502.14837), the error of each
converted layer (see `heddle.training.distillation`), or a weighted sum of them; or one loss after another, as MOHAWK
(Bick et al. 2024, https://arxiv.org/abs/2408.10189) and RADLADS (Goldstein et al. 2025, https://arxiv.org/abs/2505.03005)
train: layers first, then logits, then longer sequences.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heddle.conversion.convert import (
    CONVERSION_FILE,
    Conversion,
    ConversionSource,
    convert,
    holds_conversion,
    saved_conversion,
)
from heddle.conversion.settings import HEALING_BATCH
from heddle.conversion.weights import CalibrationText, build_model
from heddle.data.corpus import Corpus
from heddle.data.samples import CorpusLoader, RowProtocol
from heddle.errors import ConfigError, DataError
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.parts.layout import Layout
from heddle.progress import print_status, print_warning, progress_bar
from heddle.storage.file_io import read_json_file, refuse_existing, sync_folder, write_json_file
from heddle.storage.folder import read_folder, write_folder
from heddle.storage.model import WEIGHTS_FILE, load, model_tensors
from heddle.storage.run_log import FINAL_FILE, LOG_FILE, RUN_FILE
from heddle.storage.tensor_file import DTYPES
from heddle.training.distillation import Distillation, LossWeights
from heddle.training.evaluation.scores import EvaluationBudget, bits_and_bytes
from heddle.training.init_checkpoint import open_init_checkpoint
from heddle.training.job import TrainingJob
from heddle.training.loop import TrainingResult, train
from heddle.training.settings import Settings

# The text that a conversion reads: calibration, healing and evaluation never share a window of it.

CALIBRATION_TOKENS = 2**16
CALIBRATION_BATCH = 16  # rows
SAMPLE_SEED = 0  # of the order of samples, of which calibration takes the first and healing the next


def calibration_samples(tokens: int, sequence_length: int) -> int:
    """How many samples a calibration on about `tokens` tokens reads; healing begins after them."""
    rows = -(-tokens // sequence_length)
    batch_rows = min(rows, CALIBRATION_BATCH)
    return -(-rows // batch_rows) * batch_rows


def calibration_from_corpus(
    corpus: Corpus, tokens: int, sequence_length: int, device: str = "cpu", least: int = 0
) -> CalibrationText:
    """The first `tokens` tokens of a corpus's training text in the order of seed 0, in rows of `sequence_length`.

    Each row begins as the corpus says; BOS tokens count as tokens. least: tokens that are enough to calibrate on.
    Raises DataError, which says how much is needed, if the text is shorter.
    """
    rows = -(-tokens // sequence_length)
    batch_rows = min(rows, CALIBRATION_BATCH)
    windows = sum((len(file) - 1) // sequence_length for file in corpus.train)
    if windows < 2 * rows:  # as much again is left to heal on
        fewer, few = windows // 2 * sequence_length, -(-least // sequence_length)
        remedy = f"give more text, or --calibration-tokens {fewer}"
        if fewer < max(least, 1):  # a number that would be refused next
            enough = f": {2 * few} windows are enough with --calibration-tokens {least}" if 0 < few < rows else ""
            remedy = f"give more text{enough}"
        raise DataError(
            f"the training text holds {windows} windows of {sequence_length} tokens, but {2 * rows} are needed: {rows} "
            f"to calibrate on, and as many left for healing; {remedy}"
        )
    samples = calibration_samples(tokens, sequence_length)
    loader = _loader(corpus, sequence_length, batch_rows, SAMPLE_SEED)
    batches = [loader.batch(step) for step in range(samples // batch_rows)]
    inputs = [torch.from_numpy(batch.tokens[:, :-1].copy()).to(device) for batch in batches]
    layouts = [Layout.packed(batch.doc_lengths, sequence_length, device) for batch in batches]
    name = corpus.report.get("name", "text")
    return CalibrationText(inputs, layouts, name, corpus.hash, samples, corpus.rows)


def _loader(corpus: Corpus, length: int, batch_size: int, seed: int) -> CorpusLoader:
    """The training text in sequences of a length."""
    eod_id = corpus.tokenizer.eod_id
    return CorpusLoader(corpus.train, corpus.weights, length, batch_size, seed, eod_id, corpus.rows)


MAX_HEALING_RATE = 3e-3
HEALING_RATE_WIDTH = 96  # up to this width the largest rate is used
HEALING_STEP = 2048  # tokens; from there on the largest rate is used
LARGE_LOSS = 2.0  # nats per token added by a conversion; from there on the largest rate is used
MIN_RATE_SHARE = 0.1
RATE_ROWS = 16  # of the text, on which the added loss is measured
RATE_FILE, CONVERTED_FOLDER, HEAL_FOLDER = "rate.json", "converted", "heal"  # in the work folder
HEALING_FOLDER = "healing"  # in the model's folder, with the log of its healing
SAVE_EVERY = 50  # steps
ACTIVATION_BYTES = 2**30  # of the layers, in one step
MIDDLE_WINDOWS = 4  # held-out, after a stage that is not the last


def healing_rate(width: int, tokens_per_step: int = HEALING_STEP) -> float:
    """Return the largest peak learning rate for models of a width: 3e-3 up to 96, above as 1 / width.

    3e-3 is measured at width 96, on steps of 2,048 tokens; with fewer, it falls as their square root (Malladi et al.
    2022, https://arxiv.org/abs/2205.10287). That the best rate of Adam falls as 1 / width is µP's rule (Yang et al.
    2022, https://arxiv.org/abs/2203.03466).
    """
    return MAX_HEALING_RATE * min(1.0, HEALING_RATE_WIDTH / width) * min(1.0, math.sqrt(tokens_per_step / HEALING_STEP))


def rate_share(added_loss: float) -> float:
    """Return the share of the largest rate after adding this loss, in nats per token: √(loss / 2), from 0.1 to 1.

    A high rate repairs more but also does damage: the original, trained further at 3e-3, loses 0.04 bits per byte. Of
    3e-3, 1e-3 and 3e-4 the first was best after adding 2.2 nats, the second after adding 0.1 (docs/log.md).
    """
    return min(1.0, max(MIN_RATE_SHARE, math.sqrt(max(added_loss, 0.0) / LARGE_LOSS)))


def healing_settings(
    tokens: int,
    sequence_length: int,
    learning_rate: float,
    first_sample: int = 0,
    batch_size: int = HEALING_BATCH,
) -> Settings:
    """Settings to heal for about `tokens` tokens, with a cosine schedule and without weight decay.

    first_sample: how many samples of the order of seed 0 the calibration read; sequence_length must be its own.
    Raises ConfigError for fewer tokens than one step reads.
    """
    steps = tokens // max(1, batch_size * sequence_length)
    if steps < 1:
        raise ConfigError(
            f"healing tokens {tokens}: are less than one step of {batch_size * sequence_length} tokens; give more"
        )
    return Settings(
        steps=steps,
        batch_size=batch_size,
        sequence_length=sequence_length,
        learning_rate=learning_rate,
        seed=SAMPLE_SEED,
        save_every=SAVE_EVERY,
        schedule="cosine",
        weight_decay=0.0,
        first_sample=first_sample,
    )


@dataclass(frozen=True)
class HealingStage:
    """A part of a healing. share: of its tokens. length: tokens per sequence; None: the healing's own."""

    share: float
    weights: LossWeights
    length: int | None = None

    def __str__(self) -> str:
        losses = ", ".join(f"{name} {weight:g}" for name, weight in vars(self.weights).items() if weight)
        return losses if self.length is None else f"{losses}, sequences of {self.length:,} tokens"


LEAST_SHARE = 0.05  # of a stage


def parse_stages(texts: Sequence[str], settings: Settings) -> tuple[HealingStage, ...]:
    """`20%:layers`, `60%:logits=0.9,text=0.1`, `20%:logits@1024` -> stages in their order.

    settings: of the whole healing. Raises ConfigError for shares that do not add up, and for lengths and numbers of
    steps that cannot be.
    """
    stages = []
    for text in texts:
        option = f"--heal-stage {text}"
        share, colon, rest = text.partition(":")
        losses, _, length = rest.partition("@")
        try:
            number = float(share.removesuffix("%")) / 100
            tokens = int(length) if length else None
        except ValueError:
            number, tokens = math.nan, None
        if not colon or not share.endswith("%") or math.isnan(number) or rest.endswith("@"):
            raise ConfigError(f"{option}: is not a stage; write SHARE%:LOSS or SHARE%:LOSS@LENGTH, such as 20%:layers")
        if not LEAST_SHARE <= number <= 1:
            raise ConfigError(f"{option}: the share must be from {LEAST_SHARE:.0%} to 100%")
        step = settings.tokens_per_step
        if tokens is not None and (tokens < 1 or step % tokens):
            raise ConfigError(
                f"{option}: a step of {step:,} tokens does not hold whole sequences of {length}; choose a length that "
                "divides it, or another --heal-batch-size"
            )
        stages.append(HealingStage(number, LossWeights.parse(losses, "--heal-stage"), tokens))
    if stages and abs(sum(stage.share for stage in stages) - 1) > 1e-6:
        total = sum(stage.share for stage in stages)
        raise ConfigError(f"--heal-stage: the shares add up to {total:.0%}; make them 100%")
    if any(begin == end for begin, end in pairwise(_stage_ends(settings, stages))):
        steps = f"{settings.steps} steps of {settings.tokens_per_step:,} tokens"
        raise ConfigError(
            f"--heal-stage: {steps} are too few for {len(stages)} stages; give a larger --heal, or fewer stages"
        )
    return tuple(stages)


def _stage_ends(settings: Settings, stages: Sequence[HealingStage]) -> list[int]:
    """The steps before the first stage, 0, and at the end of each."""
    return [0, *(round(settings.steps * share) for share in accumulate(stage.share for stage in stages))]


def stage_settings(settings: Settings, stages: Sequence[HealingStage]) -> list[Settings]:
    """The settings of each stage of a healing: its steps, of as many tokens, on samples after the earlier stages'.

    Stages of one length share no sample; a stage of another length cuts the text into windows of its own length.
    """
    parts = []
    for stage, (begin, end) in zip(stages, pairwise(_stage_ends(settings, stages)), strict=True):
        length = stage.length or settings.sequence_length
        read = settings.first_sample * settings.sequence_length + begin * settings.tokens_per_step
        parts.append(
            replace(
                settings,
                steps=end - begin,
                sequence_length=length,
                batch_size=settings.tokens_per_step // length,
                first_sample=-(-read // length),
            )
        )
    return parts


def healing_job(
    converted: Path,
    distillation: Distillation,
    corpus: Corpus,
    settings: Settings,
    out: Path,
    device: str = "cpu",
    environment: Mapping[str, Any] | None = None,
    evaluation: EvaluationBudget | None = None,
) -> TrainingJob:
    """The training job, for `train`, that heals the converted model in a folder; its run is in the folder `out`.

    corpus: the calibration's, with as many tokens encoded; rows begin as it says, or as in a run that `out` already
    holds. Layers whose activations would take over ACTIVATION_BYTES are computed again in the backward pass: the same
    numbers. Warns if the text is too short to read each window only once.
    """
    start = open_init_checkpoint(converted)
    recomputes = settings.tokens_per_step * _activation_bytes(start.config) > ACTIVATION_BYTES
    if (run := out / RUN_FILE).is_file():
        saved = read_json_file(run)
        corpus = replace(corpus, rows=RowProtocol.parse(saved["data"]))
        recomputes = bool(saved["settings"].get("checkpoint_activations"))
    settings = replace(settings, checkpoint_activations=recomputes)
    if _repeats(corpus, settings):
        print_warning(
            f"healing reads {settings.steps * settings.tokens_per_step} tokens, more than the text has after "
            "calibration, so it reads some again; give more text"
        )
    return TrainingJob(
        config=start.config,
        source=corpus,
        settings=settings,
        out=out,
        device=device,
        label="healing",
        environment=dict(environment or {}),
        evaluation=evaluation or EvaluationBudget(),
        init_checkpoint=start,
        distillation=distillation,
    )


def _activation_bytes(config: ModelConfig) -> int:
    """About how many bytes of activations the layers keep for a token: what their matrices read and write."""
    matrices = [x.shape for x in build(config, device="meta").layers.parameters() if x.dim() > 1]
    return 4 * sum(rows + columns for *_, rows, columns in matrices)


def _repeats(corpus: Corpus, settings: Settings) -> bool:
    """Whether calibration and healing read a window of the text twice."""
    loader = _loader(corpus, settings.sequence_length, settings.batch_size, settings.seed)
    samples = np.arange(settings.samples_before(settings.steps), dtype=np.int64)
    windows = np.stack(loader.locate(samples), axis=1)
    return len(np.unique(windows, axis=0)) < len(windows)


def partial_folder(out: Path) -> Path:
    """The work folder of an unfinished conversion to `out`."""
    return out.with_name(f"{out.name}.work")


def remove_work(work: Path, model: Path, keep_converted: bool = False) -> None:
    """Remove what the work folder of a finished conversion holds to resume it: checkpoints and the converted model.

    model: the folder of the healed model, into which the logs move: `healing`, and `healing-1`, … of later stages.
    keep_converted: the converted model stays in the work folder.
    """
    for run in sorted(path for path in work.glob(f"{HEAL_FOLDER}*") if path.is_dir()):
        log = model / run.name.replace(HEAL_FOLDER, HEALING_FOLDER, 1)
        log.mkdir(exist_ok=True)
        for file in (run / name for name in (RUN_FILE, LOG_FILE, FINAL_FILE)):
            if file.is_file():
                os.replace(file, log / file.name)
        shutil.rmtree(run, ignore_errors=True)
    for file in work.glob("rate*.json"):
        file.unlink()
    if not keep_converted:
        shutil.rmtree(work / CONVERTED_FOLDER, ignore_errors=True)
    with suppress(OSError):  # it holds the converted model, or nothing
        work.rmdir()


def interrupted_rows(out: Path) -> RowProtocol | None:
    """How an interrupted conversion to `out` began its rows; None if it has read no text."""
    work = partial_folder(out)
    folders = [folder for folder in (out, work / CONVERTED_FOLDER) if (folder / CONVERSION_FILE).is_file()]
    conversions = [saved_conversion(folder) for folder in folders]
    rate, run = (
        read_json_file(path) if path.is_file() else {} for path in (work / RATE_FILE, work / HEAL_FOLDER / RUN_FILE)
    )
    records = [conversion.get(key) for conversion in conversions for key in ("text", "healing")]
    return next((RowProtocol.parse(record) for record in (*records, rate, run.get("data")) if record), None)


def convert_and_heal(
    conversion: Conversion,
    distillation: Distillation,
    corpus: Corpus,
    settings: Settings,
    out: Path,
    device: str = "cpu",
    adapt_rate: bool = True,
    environment: Mapping[str, Any] | None = None,
    plan_steps: Callable[[Sequence[TrainingJob]], int] | None = None,
    evaluation: EvaluationBudget | None = None,
    stages: Sequence[HealingStage] = (),
) -> TrainingResult | None:
    """Convert a model, heal it, and write the result as a model folder, atomically.

    environment: versions and machine, for the healing's run.json. plan_steps: called with the jobs of all stages before
    the first step; returns how many steps to train, in place of the settings'; for 0, the model is not healed, and None
    is returned. evaluation: how much held-out text is read once it is healed. stages: each begins with what the one
    before it trained; none: one with the losses of the distillation.
    adapt_rate: multiply the learning rate by `rate_share` of the loss that the conversion added, or that is left when a
    stage begins. The converted model and the runs lie in the folder `out`.work beside it until `remove_work`, so the
    same call continues after an interruption, with rows that begin as they did. Raises CheckpointError if `out` exists
    or the work folder holds another conversion, and what `convert` and `train` raise.
    """
    refuse_existing(out, "the converted model")
    work = partial_folder(out)
    corpus = replace(corpus, rows=interrupted_rows(out) or corpus.rows)
    converted = work / CONVERTED_FOLDER
    if not holds_conversion(converted, conversion, named=work):
        convert(conversion, converted)
    is_staged = bool(stages)
    stages = stages or (HealingStage(1.0, distillation.weights),)
    folders = [work / (f"{HEAL_FOLDER}-{number}" if number else HEAL_FOLDER) for number in range(len(stages))]

    def job_of(number: int, start: Path) -> TrainingJob:
        towards = replace(distillation, weights=stages[number].weights)
        own, read = stage_settings(settings, stages)[number], evaluation
        if number < len(stages) - 1:
            read = EvaluationBudget(final_tokens=MIDDLE_WINDOWS * own.sequence_length)
        return healing_job(start, towards, corpus, own, folders[number], device, environment, read)

    if plan_steps is not None and not (folders[0] / RUN_FILE).is_file():
        steps = plan_steps([job_of(number, converted) for number in range(len(stages))])
        if not steps:
            os.rename(converted, out)
            sync_folder(out.parent)
            return None
        settings = replace(settings, steps=steps)
    start, records = converted, []
    for number, stage in enumerate(stages):
        if is_staged:
            print_status(f"healing, stage {number + 1} of {len(stages)}: {stage}")
        job = job_of(number, start)
        if adapt_rate:
            file = work / (f"rate-{number}.json" if number else RATE_FILE)
            rate = _adapted_rate(conversion.source, job, corpus, file)
            job = replace(job, settings=replace(job.settings, learning_rate=rate))
        result = train(job)
        assert job.distillation is not None
        records.append(job.distillation.identity() | job.settings.identity())
        start = folders[number]
    contents = read_folder(converted)
    healing = records[-1] | {"text": corpus.hash} | corpus.rows.record() | ({"stages": records} if is_staged else {})
    documents = dict(contents.documents)
    documents[CONVERSION_FILE] = json.dumps({**conversion.describe(), "healing": healing}, indent=2) + "\n"
    dtypes = {name: DTYPES[record.dtype] for name, record in contents.tensor_records(WEIGHTS_FILE).items()}
    tensors = {name: tensor.to(dtypes[name]) for name, tensor in model_tensors(result.model).items()}
    write_folder(out, tensors={WEIGHTS_FILE: tensors}, documents=documents, kind="model")
    return result


def _adapted_rate(source: ConversionSource, job: TrainingJob, corpus: Corpus, file: Path) -> float:
    """Return the learning rate for the loss that is to be healed; measured once, then read from the file."""
    if file.is_file():
        return float(read_json_file(file)["learning_rate"])
    print_status("measuring the loss that the conversion added, which decides the learning rate")
    start, settings = job.init_checkpoint, job.settings
    assert start is not None
    loader = _loader(corpus, settings.sequence_length, 1, SAMPLE_SEED)
    rows, bits = [loader.batch(row) for row in range(RATE_ROWS)], []
    with progress_bar("measuring", 2 * RATE_ROWS, "sequences") as bar:
        for read in (lambda: build_model(source.weights), lambda: load(start.folder)[0]):  # one at a time in memory
            scores = bits_and_bytes(
                read().float(), rows, corpus.tokenizer.byte_lengths, observer=lambda *_: bar.advance(1)
            )
            bits.append(sum(score for score, _ in scores))
    added = (bits[1] - bits[0]) * math.log(2) / sum(row.targets.size for row in rows)
    share = rate_share(added)
    rate = settings.learning_rate * share
    write_json_file(file, {"added_nats_per_token": added, "learning_rate": rate} | corpus.rows.record())
    return rate
