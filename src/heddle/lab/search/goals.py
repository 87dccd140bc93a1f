"""The goals of a search: costs, which are sums over layers, and measurements of whole models.

The speed of decoding, recall and added bits per byte are measured on whole models. Recall is measured as in a
conversion's report (`heddle.training.evaluation.text_recall`), on text that no score used.
"""

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from heddle.conversion.weights import CalibrationText
from heddle.data.corpus import Corpus
from heddle.data.samples import Batch
from heddle.data.token_file import TokenFile, write_token_file
from heddle.errors import ConfigError
from heddle.lab.compare.probes import measure_speeds
from heddle.model.config import ModelConfig
from heddle.settings import parse_length
from heddle.training.evaluation.text_recall import MIN_ROW_TOKENS, TextRecall

DEFAULT_LENGTH = 2048  # of FLOPs and decoding, where no goal names a length
NEEDLES = 32  # at each depth
DECODE_ROUNDS = 3  # of MODEL and the candidate, one after the other, since a machine's speed varies
GOAL = re.compile(
    r"(?P<name>state|flops|parameters|decode|recall|quality)(?:@(?P<length>\d+k?))?"
    r"(?:(?P<sign><=|>=|=)\+?(?P<limit>\d*\.?\d+)(?P<unit>[%x]?))?"
)
EXAMPLE = "state@32k=25%, flops=80%, parameters=90%, decode=2x, recall>=95% or quality<=0.02"
# What is measured on whole models: its sign and unit, and how to write it.
MEASURED = {
    "quality": ("<=", "", "added bits per byte; write quality<=0.02"),
    "recall": (">=", "%", "a share of MODEL's accuracy; write recall>=95%"),
    "decode": (">=", "x", "a multiple of MODEL's speed; write decode=2x"),
}
DecodeTimer = Callable[[ModelConfig, int, str, torch.dtype], float]


@dataclass(frozen=True)
class Goal:
    """A limit. cost: as in `costs_of`, or "quality", "recall", or "decode@" and the tokens before the decoded ones.

    limit: a share of MODEL's cost or accuracy, added bits per byte, or a multiple of MODEL's speed; None: the least.
    """

    text: str
    cost: str
    limit: float | None

    @property
    def name(self) -> str:
        """The cost without its length."""
        return self.cost.partition("@")[0]

    @property
    def length(self) -> int | None:
        """The context length, if the cost has one."""
        return int(self.cost.partition("@")[2] or 0) or None

    @property
    def is_measured(self) -> bool:
        """Whether it takes measurements of whole models."""
        return self.name in MEASURED

    def is_met(self, value: float) -> bool:
        """Whether a measured value is within the limit."""
        assert self.limit is not None
        return value <= self.limit if self.name == "quality" else value >= self.limit

    def show(self, value: float) -> str:
        """A measured value with its unit, as text."""
        shown = {"quality": f"{value:+.3g} bits per byte", "recall": f"{value:.1%} of MODEL's accuracy"}
        return shown.get(self.name, f"{value:.2f} times MODEL's speed")


def parse_goals(texts: Sequence[str]) -> list[Goal]:
    """Read goals such as `state@32k=25%`. Raises ConfigError."""
    found = [(text, GOAL.fullmatch(text)) for text in texts]
    for text, match in found:
        if match is None or (match["name"] != "decode" and (match["name"] == "state") != bool(match["length"])):
            raise ConfigError(f"--search {text}: is not a goal; write {EXAMPLE}")
    lengths = [parse_length(match["length"]) for _, match in found if match is not None and match["length"]]
    if not all(lengths):
        raise ConfigError(f"--search {' '.join(texts)}: a context of 0 tokens has no state; write {EXAMPLE}")
    longest = max(lengths, default=DEFAULT_LENGTH)
    goals = [_goal(text, match, longest) for text, match in found if match is not None]
    kinds = ["decode" if goal.name == "decode" else goal.cost for goal in goals]
    if len(set(kinds)) < len(kinds):
        raise ConfigError(f"--search {' '.join(texts)}: two goals limit the same quantity; give one of them")
    if goals and set(kinds) <= {"quality", "recall"}:
        raise ConfigError(f"--search {texts[0]}: sets no cost to reduce; add another goal, such as state@32k")
    if goals and all(goal.limit is None for goal in goals):
        raise ConfigError(f"--search {texts[0]}: has no limit; write {EXAMPLE}")
    return goals


def _goal(text: str, match: re.Match[str], longest: int) -> Goal:
    name, unit = match["name"], match["unit"]
    limit = None if match["limit"] is None else float(match["limit"]) / (100 if unit == "%" else 1)
    if name in MEASURED:
        sign, own_unit, wanted = MEASURED[name]
        is_share = name == "recall" and unit == ""
        if limit is None or match["sign"] not in (sign, "=") or not (unit == own_unit or is_share):
            raise ConfigError(f"--search {text}: needs {wanted}")
        if (name == "recall" and not 0 < limit <= 1) or (name == "decode" and limit == 0):
            raise ConfigError(f"--search {text}: is not {wanted}")
    elif limit is not None and (match["sign"] == ">=" or unit == "x" or not 0 < limit <= 1):
        raise ConfigError(f"--search {text}: is not a share of MODEL's; write {EXAMPLE}")
    length = longest if match["length"] is None else parse_length(match["length"])
    return Goal(text, name if name in ("parameters", "quality", "recall") else f"{name}@{length}", limit)


def check_recall_length(goals: Sequence[Goal], sequence_length: int) -> None:
    """Raises ConfigError for a goal of recall on sequences that hold no needle."""
    for goal in goals:
        if goal.name == "recall" and sequence_length < MIN_ROW_TOKENS + 2:
            reason = f"needs sequences of {MIN_ROW_TOKENS + 2} tokens or more"
            raise ConfigError(f"--search {goal.text}: {reason}; give a longer --sequence-length")


def decode_speed(design: ModelConfig, context: int, device: str, dtype: torch.dtype) -> float:
    """Tokens per second of one sequence, decoded after `context` tokens by a design with fresh weights."""
    samples = measure_speeds(design, (context,), device, dtype)["decode"]
    return statistics.median(samples[0][1])


def recall_rows(corpus: Corpus, text: CalibrationText, file: Path) -> list[tuple[float | None, list[Batch]]]:
    """Needles at each depth in sequences of a text, and (None, the sequences without them); see `TextRecall`.

    file: where the text is written to. Raises ConfigError if no document is long enough.
    """
    tokenizer = corpus.tokenizer
    if not file.is_file():
        with write_token_file(
            file, vocab_size=tokenizer.vocab_size, eod_id=tokenizer.eod_id, tokenizer_hash=tokenizer.hash
        ) as writer:
            writer.add([*_documents(text, {tokenizer.eod_id, *corpus.rows.bos_ids})], 0)
            writer.end_source()
    length = max(batch.shape[1] for batch in text.batches)
    rows = TextRecall(replace(corpus, validation=TokenFile(file)), length, spans=0, needles=NEEDLES)
    if not rows.row_length:
        reason = f"needs a document of {MIN_ROW_TOKENS + 2} tokens in the text of the checks"
        raise ConfigError(f"--search recall: {reason}; give longer texts, or more --calibration-tokens")
    return rows.needle_rows


def _documents(text: CalibrationText, marks: set[int]) -> list[np.ndarray]:
    """The documents of a text, or parts of them, without end and BOS tokens."""
    documents = []
    for batch, layout in zip(text.batches, text.layouts, strict=True):
        ids, is_token = layout.dense_segment_ids, layout.positions >= 0
        for row in range(len(batch)):
            for number in ids[row][is_token[row]].unique().tolist():
                tokens = batch[row][is_token[row] & (ids[row] == number)].cpu().numpy()
                documents.append(tokens[~np.isin(tokens, list(marks))])
    return documents
