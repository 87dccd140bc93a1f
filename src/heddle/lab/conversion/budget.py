"""How many tokens to calibrate on, and how many steps of healing, fit a conversion's `--budget`."""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from heddle.config import DesignError
from heddle.conversion.convert import Conversion, ConversionSource
from heddle.conversion.heal import CALIBRATION_TOKENS
from heddle.conversion.settings import MIN_WINDOWS, ConvertSettings
from heddle.conversion.targets import ConversionVariant
from heddle.conversion.weights import CalibrationText
from heddle.errors import ConfigError, MachineError
from heddle.lab.compare.budget import END_SHARE, TimeBudget, format_seconds
from heddle.lab.compare.probes import time_reading, time_training_steps
from heddle.lab.conversion.run import ConversionReport, report_seconds
from heddle.model.config import ModelConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.progress import format_duration, print_status, quiet
from heddle.storage.file_io import read_json_file, write_json_file
from heddle.training.built_models import build_models
from heddle.training.job import TrainingJob
from heddle.training.loop import FINAL_EVALUATION_TOKENS

CHOICE_FILE = "budget.json"  # what a budget chose, until the work is complete: every healing has the same length
MIN_TIMED_STEPS = 20  # timing a shorter healing takes about as long as the healing
CALIBRATION_SHARE = 0.3  # of the time that a budget leaves after the text is read
MIN_CHOSEN_STEPS = 50  # the shortest healing that a budget chooses: the first ten are warmup, and the rate decays to 0


def chosen_before(choice: Path) -> dict[str, int]:
    """What an interrupted call chose by its budget: the healing_steps of each healing, and calibration_tokens."""
    return read_json_file(choice) if choice.is_file() else {}


def least_calibration(design: ModelConfig, length: int) -> int:
    """Tokens that every rewrite can calibrate on, in whole rows."""
    mixers = [layer.mixer for _, layer in design.expand()]
    widths = [each.heads * (each.value_dim or 0) for each in mixers if isinstance(each, AttentionConfig)]
    return length * max(2, -(-4 * max(design.width, *widths, 0) // length))


def text_of_size(tokens: int, length: int) -> CalibrationText:
    """A text without tokens: enough to plan conversions that choose nothing on a text."""
    return CalibrationText([torch.empty((-(-tokens // length), length), dtype=torch.int64, device="meta")], [])


def calibration_seconds(
    source: ConversionSource, variants: Sequence[ConversionVariant], text: CalibrationText
) -> float:
    """How long all conversions take on a text; nothing is written."""
    began = time.monotonic()
    with quiet():
        for variant in variants:
            with suppress(DesignError, ConfigError):  # it is left out later, with the reason
                weights = Conversion(source, variant.rewrites, text).plan()
                for name in weights.names:
                    weights.tensor(name)
    return time.monotonic() - began


def affordable_calibration(
    source: ConversionSource, variants: Sequence[ConversionVariant], text: CalibrationText, budget: TimeBudget
) -> int:
    """The tokens to calibrate on that fit a budget, extrapolated from a short text; at most CALIBRATION_TOKENS.

    Raises ConfigError, naming a sufficient budget, if not even the short text fits.
    """
    print_status(f"timing the calibration on {text.tokens:,} tokens")
    seconds = max(calibration_seconds(source, variants, text), 1e-3)
    tokens = min(CALIBRATION_TOKENS, int(text.tokens * CALIBRATION_SHARE * budget.remaining / seconds))
    if tokens < text.tokens:
        spent = budget.seconds - budget.remaining
        enough = math.ceil(1.1 * (spent + seconds / CALIBRATION_SHARE) / (1 - END_SHARE))
        given, takes = format_seconds(budget.seconds), format_seconds(seconds)
        raise ConfigError(
            f"--budget {given}: is too short to calibrate: {text.tokens:,} tokens take about {takes}, and at "
            f"most {CALIBRATION_SHARE:.0%} of the budget is for them; give {enough}s or more, and time to "
            "heal and report"
        )
    if tokens < CALIBRATION_TOKENS:
        print_status(f"the budget chose: --calibration-tokens {tokens}")
    return tokens


@dataclass
class HealingPlan:
    """Decides how long to heal; a time budget chooses the length, or rejects one that was set.

    budget: for the whole command; None: no limit. source: the original. variants: of it, each measured for the report
    before and after healing. text_tokens: to heal on; a budget reads them at most once. choice: the file that keeps
    the choice of the budget until the work is complete. steps: per healing; None until the budget has chosen.
    """

    settings: ConvertSettings
    budget: TimeBudget | None
    source: ConversionSource
    variants: int
    report: ConversionReport | None
    text_tokens: int
    choice: Path
    steps: int | None

    def decide(self, jobs: Sequence[TrainingJob], count: int, begun: float) -> int:
        """The steps of the first of `count` pending healings, from the timing of a few steps; 0 for no healing.

        jobs: one for each stage. begun: when its conversion began, in time.monotonic() seconds; the others are assumed
        to take as long. Raises MachineError if a length that was set does not fit.
        """
        if self.steps == 0:
            return 0
        tokens = jobs[-1].settings.tokens_per_step
        if self.budget is None and self.steps is not None and self.steps <= MIN_TIMED_STEPS:  # timing would take longer
            print_status(f"healing: {self.steps:,} steps of {tokens:,} tokens; the first will show how long they take")
            return self.steps
        print_status("timing the first steps of the healing")
        converting = (count - 1) * (time.monotonic() - begun)
        timed, whole, report, left = [], sum(job.settings.steps for job in jobs), 0.0, 0.0
        for job in jobs:
            built = build_models(job)
            timed.append(median(time_training_steps(job, built)))
        seconds = sum(each * job.settings.steps / whole for each, job in zip(timed, jobs, strict=True))
        if self.budget is not None:  # reading is timed by itself: a step of few tokens is mostly the optimizer's
            batch = job.training_data.train_batches(replace(job.settings, seed=0))(0)
            report = count * evaluation_tokens(self.settings) * time_reading(batch, built.model)
            del built
            if self.report is not None:
                report += report_seconds(self.source, self.report, 1 + 2 * self.variants, 1 + self.variants)
            left = max(0.0, self.budget.remaining - report - converting)
        fitting = int(left / (seconds * count))
        if self.steps is None:
            self.steps = self._choose(fitting, tokens)
            write_json_file(self.choice, chosen_before(self.choice) | {"healing_steps": self.steps})
        if not self.steps:
            return 0
        plan = f"healing: {self.steps:,} steps of {tokens:,} tokens"
        print_status(f"{plan}, about {format_duration(seconds * self.steps)} ({seconds:.2g} s/step)")
        if self.settings.heal is not None and self.budget is not None and self.steps > fitting:
            training = seconds * self.steps * count  # of all variants, not of this one
            missing = training + report + converting - self.budget.remaining
            larger = f"--budget {math.ceil((self.budget.seconds + missing) / 60)}m or more"
            remedy = f"--heal {fitting * tokens} or fewer, or {larger}" if fitting else f"{larger}, or --heal 0"
            raise MachineError(
                f"--heal {self.settings.heal}: takes about {format_duration(training)}, and --budget "
                f"{self.settings.budget} leaves {format_duration(left)} beside the report, which takes about "
                f"{format_duration(report)}; give {remedy}; converted models are kept"
            )
        return self.steps

    def _choose(self, steps: int, tokens: int) -> int:
        """At most `steps` steps of `tokens` tokens, and at most one pass over the text; 0 if that is too few."""
        once = self.text_tokens // tokens
        if min(steps, once) < MIN_CHOSEN_STEPS:
            beside_report = f"the budget leaves {steps} steps beside the report"
            few = f"the text has {once} steps" if once < steps else beside_report
            print_status(f"the budget chose: no healing: {few}, and fewer than {MIN_CHOSEN_STEPS} may harm")
            return 0
        end = "the whole text once, in less than the budget" if once < steps else "what the budget leaves"
        print_status(f"the budget chose: --heal {min(steps, once) * tokens} ({end})")
        return min(steps, once)


def evaluation_tokens(settings: ConvertSettings) -> int:
    """Held-out tokens that are read after a healing; without a report only a few, to check that the loss is finite."""
    return min(settings.report_tokens, FINAL_EVALUATION_TOKENS) or MIN_WINDOWS * settings.sequence_length
