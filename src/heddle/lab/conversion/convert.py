"""Convert a trained model as `heddle convert` does, from settings: `heddle.convert`."""

import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from heddle.config import DesignError
from heddle.conversion.convert import (
    CONVERSION_FILE,
    Conversion,
    ConversionSource,
    open_source,
)
from heddle.conversion.convert import convert as convert_model
from heddle.conversion.heal import (
    CALIBRATION_BATCH,
    CALIBRATION_TOKENS,
    CONVERTED_FOLDER,
    HEAL_FOLDER,
    calibration_from_corpus,
    calibration_samples,
    convert_and_heal,
    healing_rate,
    healing_settings,
    parse_stages,
    partial_folder,
    remove_work,
)
from heddle.conversion.rewrite import Rewrite, naming_layers
from heddle.conversion.rewrites.window import Window
from heddle.conversion.settings import HEALING_BATCH, ConvertSettings, check_options, token_errors
from heddle.conversion.targets import ConversionVariant, conversion_variants, print_rewrites
from heddle.conversion.weights import CalibrationText
from heddle.data.corpus import Corpus, prepare_corpus
from heddle.data.samples import RowProtocol
from heddle.data.sources import check_sources, describe_files
from heddle.errors import CheckpointError, ConfigError, DataError
from heddle.exchange.imported_checkpoint import LENGTH_FIELDS
from heddle.lab.compare.budget import TimeBudget, kernel_seconds
from heddle.lab.compare.results import plain
from heddle.lab.conversion.budget import (
    CHOICE_FILE,
    MIN_CHOSEN_STEPS,
    HealingPlan,
    affordable_calibration,
    chosen_before,
    evaluation_tokens,
    least_calibration,
    text_of_size,
)
from heddle.lab.conversion.measure import (
    DRY_RUN_CONTEXT,
    MeasurementSettings,
    conversion_costs,
    print_costs,
)
from heddle.lab.conversion.results import (
    SEARCH,
    ConversionResults,
    conversion_verdict,
    harmed_models,
    measured_text_sentence,
)
from heddle.lab.conversion.run import (
    AGAIN,
    BASELINES_FOLDER,
    RESULT_FOLDER,
    RESULTS_FILE,
    ConversionReport,
    check_report_text,
    interrupted_report_rows,
    is_converted,
    part_path,
    refuse_finished,
    report_conversion,
    report_variants,
    write_baselines,
)
from heddle.lab.search.results import SearchResults
from heddle.machine import recorded_choices, with_measured_choices
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.model.size import size
from heddle.progress import format_duration, parse_duration, print_status, print_text, print_warning, quiet
from heddle.runtime import Choices, Runtime, versions
from heddle.session import TRAINING_NEEDS, open_session
from heddle.storage.file_io import read_json_file, refuse_existing, remove_folder, write_json_file
from heddle.storage.model import require_tokenizer
from heddle.storage.run_log import RUN_FILE
from heddle.training.distillation import Distillation, LossWeights
from heddle.training.evaluation.scores import EvaluationBudget
from heddle.training.init_checkpoint import model_rows
from heddle.training.settings import Settings

if TYPE_CHECKING:
    from heddle.lab.search.goals import Goal
    from heddle.lab.search.plan import SearchInput
    from heddle.lab.search.search import Search

BUDGET_CONTEXT = 8192  # tokens, for which it is said what a budget leaves of the state
SEARCH_FOLDER = "search"  # in the work folder
BATCH_FLOPS = 2e11  # of the rows that a CPU reads at a time: a few seconds
MOST_TOKENS_A_SECOND = 10_000  # an upper bound, since the text is encoded before a budget chooses the steps


@dataclass(frozen=True)
class ConvertedModel:
    """One conversion or several. folder: None if nothing was written. results: measurements, if there are any.

    costs: from a dry run, by conversion, `before` and `after`: parameters, context_length, state_bytes of a sequence of
    that length, states by length, state_bytes_per_token, flops_per_token, the architecture of the export, and gguf: the
    architecture in llama.cpp, or "no".
    """

    folder: Path | None
    results: ConversionResults | None = None
    costs: dict[str, dict[str, dict[str, Any]]] | None = None


def convert(
    model: ConvertSettings | str | Path | None = None, out: str | Path | None = None, **options: Any
) -> ConvertedModel:
    """Convert a trained model as `heddle convert` does, with its options, defaults and output.

    model: a run, a model folder or a transformers folder; or one `ConvertSettings`. out: the folder to write.
    options: as on the command line, such as `to=["kv_heads=2"]`. Raises ConfigError for an unknown or invalid option,
    and the errors that the command reports.
    """
    if isinstance(model, ConvertSettings):
        return _convert(model)
    return _convert(ConvertSettings.read({"model": model, "out": out, **options}))


def _interrupted_healing(out: Path | None) -> Path | None:
    """The run of a healing that was interrupted on the way to `out`."""
    runs = () if out is None else sorted(partial_folder(out).rglob(f"{HEAL_FOLDER}/{RUN_FILE}"))
    return runs[0].parent if runs else None


def _report_choices(out: Path | None) -> Choices | None:
    """The CPU kernels that an interrupted report for `out` chose; None without one."""
    for folder in () if out is None else (out, partial_folder(out) / RESULT_FOLDER):
        for path in (folder / RESULTS_FILE, part_path(folder / RESULTS_FILE)):
            with suppress(CheckpointError, ConfigError, KeyError):
                saved = read_json_file(path) if path.is_file() else {}
                return Choices.read(saved.get("of", saved)["hardware"]["choices"], str(path))
    return None


def _convert(settings: ConvertSettings) -> ConvertedModel:
    started = time.monotonic()
    if not settings.list_:
        check_options(settings)
    with ExitStack() as stack:
        interrupted = _interrupted_healing(settings.out)
        choices = _report_choices(settings.out) if interrupted is None else recorded_choices(interrupted)
        runtime = open_session(stack, settings, choices=choices)
        if settings.list_:
            print_rewrites()
            return ConvertedModel(None)
        job = _ConversionJob(settings, runtime, started)
        if choices is None and not settings.dry_run:
            job.runtime = with_measured_choices(
                runtime, settings.threads, TRAINING_NEEDS, kernel_seconds(settings.budget)
            )
        job.prepare()
        if settings.dry_run and job.goals:
            job.plan_search()
            return ConvertedModel(None)
        if settings.dry_run:
            costs = job.costs()
            print_costs(costs, settings.json)
            return ConvertedModel(None, costs=costs)
        assert settings.out is not None
        results = job.run(settings.out)
    print_results(results, settings.out, settings.json)
    return ConvertedModel(settings.out, results)


def _warn_of_state(design: ModelConfig, converted: ModelConfig) -> None:
    """Warn if the converted model's state is larger; a report says so itself."""
    context = design.usual_length(DRY_RUN_CONTEXT)
    sizes = (size(each, context) for each in (design, converted))
    before, after = (each.state_bytes - each.position_table_bytes for each in sizes)
    if after > before:
        print_warning(f"the state grows to {after / before:.1f} times the original's")


def _say_share_of_state(rewrites: Sequence[Rewrite], design: ModelConfig, converted: ModelConfig) -> None:
    """Print what a budget per token leaves of the whole state: windows and other layers do not grow with the text."""
    if all(getattr(rewrite, "state_budget", None) is None for rewrite in rewrites):
        return
    context = design.usual_length(BUDGET_CONTEXT)
    sizes = (size(each, context) for each in (design, converted))
    before, after = (each.state_bytes - each.position_table_bytes for each in sizes)
    share = f"at {context:,} tokens {after / before:.0%} of the whole state remains"
    print_status(f"state_budget is a share of the state per token of the converted layers; {share}")


class _ConversionJob:
    """The conversions of one call: their text, how they are healed, and what is measured.

    chosen: what an interrupted call chose by its budget, saved in the file `choice`. healing: its steps are a minimum
    until the budget has chosen; None: no healing.
    """

    def __init__(self, settings: ConvertSettings, runtime: Runtime, started: float) -> None:
        self.settings, self.runtime = settings, runtime
        seconds = None if settings.budget is None else parse_duration(settings.budget, "--budget")
        self.budget = None if seconds is None else TimeBudget(seconds, started)
        assert settings.model is not None
        self.variants: tuple[ConversionVariant, ...] = ()
        if not settings.search:
            self.variants = conversion_variants(settings.to, settings.sweep, settings.method == "all")
        self.rewrites = [rewrite for variant in self.variants for rewrite in variant.rewrites]
        self.is_comparison = bool(settings.sweep or settings.method)
        out = settings.out
        if out is None and not settings.dry_run:
            raise ConfigError("OUT: is missing; name the folder to write")
        check_sources((*settings.data, *settings.second_data))
        if out is not None:
            refuse_finished(out, settings.command_line("convert"))
            if not self.is_comparison and not (out / CONVERSION_FILE).is_file():
                refuse_existing(out, "the converted model")
        self.source = open_source(settings.model)
        for rewrite in self.rewrites:
            self.source.check_tokenizers(rewrite)
        self.design = self.source.weights.design
        self.goals: list[Goal] = []
        if settings.search:
            from heddle.lab.search.goals import parse_goals
            from heddle.lab.search.plan import check_goals, kept_layers, search_tokens

            self.goals = parse_goals(settings.search)
        if (self.goals or self.is_comparison) and not can_report(self.source):
            which = "--search" if self.goals else "--sweep and --method"
            raise ConfigError(f"{which}: needs a causal language model with a tokenizer; convert with --to instead")
        self.rows = None if out is None else interrupted_report_rows(out)
        self.choice = None if out is None else partial_folder(out) / CHOICE_FILE
        self.chosen = {} if self.choice is None else chosen_before(self.choice)
        self.calibration_tokens = settings.calibration_tokens or CALIBRATION_TOKENS
        if self.goals:
            self.kept = kept_layers(settings.keep, self.design)
            self.calibration_tokens = search_tokens(self.calibration_tokens)
        self._check_tokens()
        if self.goals:
            text, weights = self._size_of_text, self.source.weights
            check_goals(weights, text, self.goals, settings.only, self.kept, settings.sequence_length)
        self.distillation = Distillation(
            self.source, LossWeights.parse(settings.heal_loss, "--heal-loss"), settings.heal_parameters or "all"
        )
        self.text: CalibrationText | None = None
        self.second: CalibrationText | None = None
        self.corpus: Corpus | None = None
        self.healing = self._healing()
        self.stages = () if self.healing is None else parse_stages(settings.heal_stage, self.healing)
        self._check_variants()

    @property
    def chooses_healing(self) -> bool:
        """Whether the budget chooses the length of a healing."""
        return self.settings.heal is None and self.healing is not None

    @property
    def _size_of_text(self) -> CalibrationText:
        return text_of_size(self.calibration_tokens, self.settings.sequence_length)

    def _check_tokens(self) -> None:
        """Raise ConfigError for all tokens that are too few at once, before any text or weight is read."""
        settings, length, errors = self.settings, self.settings.sequence_length, token_errors(self.settings)
        why, least = "is too few to fit matrices as wide as the model's", least_calibration(self.design, length)
        is_short = self.calibration_tokens < least and any(map(self._needs_more_text, self.variants))
        if self.goals:
            why, least = "is too few for a search, which fits, scores and checks on three texts", 3 * CALIBRATION_BATCH
            is_short = calibration_samples(self.calibration_tokens, length) < least
            least *= length
        if is_short and settings.calibration_tokens is not None:
            errors.append(
                f"--calibration-tokens {settings.calibration_tokens}: {why}; give --calibration-tokens {least} or more"
            )
        if errors:
            raise ConfigError("; and ".join(errors))

    def _needs_more_text(self, variant: ConversionVariant) -> bool:
        """Whether a variant chooses on the text, or the text is too short for it and `least_calibration` is enough."""
        length = self.settings.sequence_length

        def is_possible(tokens: int) -> bool:
            try:
                with quiet():
                    Conversion(self.source, variant.rewrites, text_of_size(tokens, length)).plan()
            except (DesignError, ConfigError):
                return False
            return True

        reading = [rewrite for rewrite in variant.rewrites if rewrite.needs_text]
        if any(rewrite.chooses_on_text for rewrite in reading):
            return any(rewrite.fits_on_text for rewrite in reading)
        return not is_possible(self.calibration_tokens) and is_possible(least_calibration(self.design, length))

    def _check_variants(self) -> None:
        """Raise DesignError or ConfigError where no variant is possible, before any text or weight is read."""
        errors = []
        for variant in self.variants:
            try:
                for rewrite in variant.rewrites[:1]:  # later ones apply to the design that it makes
                    with naming_layers(self.design):
                        rewrite.check_layers(self.design)
                if not any(rewrite.needs_text and rewrite.chooses_on_text for rewrite in variant.rewrites):
                    Conversion(self.source, variant.rewrites, self._size_of_text).plan()
            except (DesignError, ConfigError) as error:
                errors.append(error)
        if errors and len(errors) == len(self.variants):
            raise errors[0]

    def _healing(self) -> Settings | None:
        settings = self.settings
        if settings.heal == 0 or (settings.heal is None and self.budget is None):
            return None
        batch_size = HEALING_BATCH if settings.heal_batch_size is None else settings.heal_batch_size
        length = settings.sequence_length
        rate = healing_rate(self.design.width, batch_size * length) if settings.heal_lr is None else settings.heal_lr
        least = batch_size * length * (MIN_CHOSEN_STEPS if settings.heal_stage else 1)
        tokens = least if settings.heal is None else settings.heal
        first_sample = calibration_samples(self.calibration_tokens, length)
        healing = healing_settings(tokens, length, rate, first_sample, batch_size)
        steps = self.chosen.get("healing_steps")
        return replace(healing, steps=steps) if settings.heal is None and steps else healing

    def prepare(self) -> None:
        """Read the text to calibrate on where a rewrite needs it."""
        if self.goals:
            self._read_calibration_text()
            return
        if self.chooses_healing and all(rewrite.is_exact(self.design) for rewrite in self.rewrites):
            print_status("an exact conversion needs no healing, so the budget is ignored")
            self.healing = None
        read = [rewrite for rewrite in self.rewrites if rewrite.needs_text and not rewrite.is_exact(self.design)]
        if self.settings.dry_run and not any(rewrite.sizes_on_text for rewrite in read):
            if self.settings.data:
                counted = f"{describe_files(self.settings.data)}; listed, not read"
                print_status(
                    f"{counted}: sizes and costs follow from the design, and the length of the text is not checked"
                )
            self.text = self._size_of_text
        elif read:
            self._read_calibration_text()

    def _read_calibration_text(self) -> None:
        length, device = self.settings.sequence_length, self.runtime.device
        corpus = self._encoded_text()
        least = max(least_calibration(self.design, length), 3 * CALIBRATION_BATCH * length if self.goals else 0)
        chooses = self.budget is not None and self.settings.calibration_tokens is None and not self.goals
        if chooses and least < CALIBRATION_TOKENS:
            assert self.budget is not None
            count = self.chosen.get("calibration_tokens")
            if not count:
                short = calibration_from_corpus(corpus, least, length, device)
                count = affordable_calibration(self.source, self.variants, short, self.budget)
            self.calibration_tokens = count
            if self.choice is not None and not self.settings.dry_run:
                write_json_file(self.choice, self.chosen | {"calibration_tokens": count})
            if self.healing is not None:
                self.healing = replace(self.healing, first_sample=calibration_samples(count, length))
        self.text = calibration_from_corpus(corpus, self.calibration_tokens, length, device, least)
        if self.settings.second_data:
            settings = replace(self.settings, data=self.settings.second_data)
            other = _corpus(settings, self.source, 4 * self.calibration_tokens, corpus.rows)
            self.second = calibration_from_corpus(other, self.calibration_tokens, length, device)

    def _encoded_text(self) -> Corpus:
        """The text, read once."""
        if self.corpus is None:
            healing = self.settings.heal
            if healing is None:
                healing = 0 if self.budget is None else int(self.budget.seconds * MOST_TOKENS_A_SECOND)
            self.corpus = _corpus(self.settings, self.source, 4 * self.calibration_tokens + healing, self.rows)
        return self.corpus

    def costs(self) -> dict[str, dict[str, dict[str, Any]]]:
        """The costs of every conversion, before and after."""
        plans = {each.name: Conversion(self.source, each.rewrites, self.text).plan().design for each in self.variants}
        for variant in self.variants:
            _say_share_of_state(variant.rewrites, self.design, plans[variant.name])
        limit = next(
            (n for name in LENGTH_FIELDS if (n := self.source.imported_config.get(name)) is not None), math.inf
        )
        usual = [length for length in MeasurementSettings.state_contexts if length <= limit]
        shown = [*usual, *self.settings.speed_context_length]
        weights, family = self.source.weights, self.source.family
        return {name: conversion_costs(weights, plan, shown, family) for name, plan in plans.items()}

    def run(self, out: Path) -> ConversionResults | None:
        """Write the converted models, and measure them unless no report is wanted."""
        settings, report = self.settings, None
        with_report = settings.report_tokens > 0 and can_report(self.source)
        corpus = self._encoded_text() if self.healing is not None or with_report else self.corpus
        if with_report:
            assert corpus is not None
            report = conversion_report(settings, self.source, corpus, self.runtime, self.rewrites)
            check_report_text(report)
        most_tokens = 0 if corpus is None else sum(len(tokens) for tokens in corpus.train)
        steps = self.chosen.get("healing_steps") if self.healing is None or self.chooses_healing else self.healing.steps
        choice = partial_folder(out) / CHOICE_FILE
        conversion, searched, baselines = (None, None, {}) if self.is_comparison else self._conversion(out)
        variants = max(1, len(self.variants))
        plan = HealingPlan(settings, self.budget, self.source, variants, report, most_tokens, choice, steps)
        write = partial(self._write, plan)
        results = None
        if conversion is None:
            assert report is not None, "a comparison has a report"
            results = report_variants(self.source, self.variants, self.text, write, out, report)
        else:
            if report is not None:
                report = replace(report, search=searched)
            is_healed = None if self.chooses_healing else self.healing is not None
            is_written = is_converted(conversion, out, is_healed)
            if is_written and report is None:
                raise CheckpointError(f"{out}: exists already: this conversion is finished; {AGAIN}")
            if not is_written:
                write(conversion, out)
                _say_share_of_state(conversion.rewrites, self.design, open_source(out).weights.design)
            others = write_baselines(baselines, write, partial_folder(out) / BASELINES_FOLDER)
            if report is not None:
                results = report_conversion(conversion, out, report, others)
        choice.unlink(missing_ok=True)
        if self.goals:
            remove_folder(partial_folder(out) / SEARCH_FOLDER)
            shutil.rmtree(partial_folder(out) / BASELINES_FOLDER, ignore_errors=True)
        if conversion is not None:
            harmed = [] if results is None else [model.source for model in harmed_models(results)]
            remove_work(partial_folder(out), out, out.name in harmed)
        with suppress(OSError):  # it holds what healing made worse
            choice.parent.rmdir()
        if results is None:
            _warn_of_state(self.design, open_source(out).weights.design)
        return results

    def _conversion(self, out: Path) -> tuple[Conversion, SearchResults | None, Mapping[str, Conversion]]:
        """The one requested conversion, or the one that a search chooses, and the baselines that are also healed."""
        if not self.goals:
            return Conversion(self.source, self.variants[0].rewrites, self.text), None, {}
        search = self._search(partial_folder(out) / SEARCH_FOLDER)
        conversion, results = search.run()
        baselines = search.baselines(results) if self.settings.heal_baselines else {}
        named = {SEARCH: conversion, **baselines}
        self.variants = tuple(ConversionVariant(name, "layerwise", each.rewrites) for name, each in named.items())
        return conversion, results, baselines

    def _search_input(self, folder: Path) -> "SearchInput":
        from heddle.lab.search.plan import SearchInput

        assert self.text is not None
        assert self.corpus is not None
        return SearchInput(
            self.source, self.text, self.goals, self.settings.only, self.kept, self.settings.sequence_length, folder,
            self.corpus, self.budget, self.second,
        )  # fmt: skip

    def _search(self, folder: Path) -> "Search":
        from heddle.lab.search.plan import expected_seconds
        from heddle.lab.search.search import Search

        given = self._search_input(folder)
        expected_seconds(given)
        return Search(given)

    def plan_search(self) -> None:
        """Print what a search would try, and about how long it takes; nothing is written."""
        from heddle.lab.search.plan import expected_seconds

        with TemporaryDirectory() as folder:
            plan, seconds = expected_seconds(self._search_input(Path(folder)))
        counts = Counter(item.target for item in plan.items)
        if self.settings.json:
            print_text(json.dumps({"replacements": counts, "left_out": plan.replacements.left_out, "seconds": seconds}))
            return
        tried = ", ".join(f"{target} in {count} layers" for target, count in counts.items())
        print_text(
            f"would try {tried}: about {format_duration(seconds)}, without healing and report. Nothing was written."
        )

    def _write(self, plan: HealingPlan, conversion: Conversion, folder: Path) -> None:
        """Write one converted model, healed if it is to be."""
        if self.healing is None:
            convert_model(conversion, folder)
            if self.settings.heal == 0:  # as a refused --heal proposes, which kept the same model there
                remove_folder(partial_folder(folder) / CONVERTED_FOLDER)
            return
        assert self.corpus is not None
        order = [variant.rewrites for variant in self.variants]
        left, begun = len(order) - order.index(conversion.rewrites), time.monotonic()
        healed = convert_and_heal(
            conversion,
            self.distillation,
            self.corpus,
            self.healing,
            folder,
            self.runtime.device,
            self.settings.heal_lr is None,
            {"runtime": self.runtime.describe(), "versions": versions()},
            partial(plan.decide, count=left, begun=begun),
            EvaluationBudget(final_tokens=evaluation_tokens(self.settings)),
            self.stages,
        )
        prints = not (self.is_comparison or self.settings.heal_baselines or self.settings.json)
        if healed is not None and self.settings.report_tokens and prints:
            loss = f"{healed.bits_per_byte:.4f} bits per byte on held-out text after healing"
            others = "" if plan.report is None else ", on other sequences than the report's"
            print_text(f"{loss} ({self.corpus.rows}{others})")


def _corpus(settings: ConvertSettings, source: ConversionSource, max_tokens: int, rows: RowProtocol | None) -> Corpus:
    """The text to calibrate and heal on, in the model's own tokens; how much of it is encoded decides its order.

    rows: how rows begin in the conversion that is resumed.
    """
    tokenizer = require_tokenizer(source.tokenizer, source.folder)
    try:
        tokenizer.byte_lengths  # noqa: B018
    except DataError as error:
        reason = "its tokenizer does not give every text back, so texts cannot be measured"
        raise DataError(f"{source.folder}: {reason}; choose options that need no text (--list)") from error
    data = settings.data or ("stdlib",)
    own_rows = model_rows(source.folder, tokenizer)
    if rows is not None and rows != own_rows:
        how = "without the model's BOS token" if own_rows.bos_ids else "with BOS, which the model was trained without"
        print_warning(
            f"rows begin {how}, as in the conversion that is resumed, so losses differ from normal use; remove "
            "the unfinished conversion to start again"
        )
    return prepare_corpus(
        data, vocab_size=None, max_train_tokens=max_tokens, tokenizer=tokenizer, rows=rows or own_rows
    )


def can_report(source: ConversionSource) -> bool:
    """Whether bits per byte can be measured for a model; prints why if not."""
    model = build(source.weights.design, device="meta")
    reason = ""
    if source.tokenizer is None:
        reason = "the model has no tokenizer"
    elif not model.causal or model.encoder_width is not None:
        reason = "the model is not a causal language model"
    if reason:
        print_status(f"no report: {reason}")
    return not reason


def conversion_report(
    settings: ConvertSettings,
    source: ConversionSource,
    corpus: Corpus,
    runtime: Runtime,
    rewrites: Sequence[Rewrite] = (),
) -> ConversionReport:
    """How the conversions of a model are measured. Warns where no sequence fills a window."""
    default = MeasurementSettings()
    contexts = tuple(sorted(set(settings.speed_context_length or default.speed_contexts)))
    length = settings.sequence_length
    windows, design = settings.report_tokens // length, source.weights.design
    measured = MeasurementSettings(
        sequence_length=length,
        windows=windows,
        batch_size=_batch_size(design, length) if runtime.device == "cpu" else default.batch_size,
        span_rows=max(4, min(default.span_rows, windows // 4)),
        needle_rows=max(4, min(default.needle_rows, windows // 8)),
        speed_contexts=contexts,
    )
    warnings = _unseen_windows(rewrites, length)
    for warning in warnings:
        print_warning(warning)
    command, folder = settings.command_line("convert"), str(source.folder)
    return ConversionReport(corpus, measured, runtime.device, command, folder, runtime.describe(), warnings)


def _batch_size(design: ModelConfig, length: int) -> int:
    """The rows that a CPU reads at a time, few for large models: a killed call loses the last ones."""
    shortest = design.usual_length(length)
    flops = length * size(design, shortest).flops_per_token
    return max(1, min(MeasurementSettings.batch_size, int(BATCH_FLOPS / flops)))


def _unseen_windows(rewrites: Sequence[Rewrite], length: int) -> tuple[str, ...]:
    """A sentence if sequences of `length` tokens fit in a window, so that a report on them cannot show its cost."""
    windows = sorted({rewrite.window for rewrite in rewrites if isinstance(rewrite, Window)})
    wide = [window for window in windows if window >= length]
    if not wide:
        return ()
    fit = f"sequences of {length} tokens fit in a window of {wide[0]}, so the report cannot show its cost"
    return (f"{fit}; give --sequence-length {2 * wide[-1]}",)


def print_results(results: ConversionResults | None, out: Path, as_json: bool) -> None:
    """Print the results, and where they are."""
    if results is None:
        print_text(str(out))
        return
    if as_json:
        print_text(json.dumps(plain(results), indent=2))
        return
    for sentence in (*conversion_verdict(results), measured_text_sentence(results)):
        print_text(sentence)
    print_text(f"report: {out / 'convert.html'}")
    print_text(str(out))
