"""The text that a conversion reads: calibration, healing and evaluation never share a window of it."""

import torch

from heddle.conversion.weights import CalibrationText
from heddle.data.corpus import Corpus
from heddle.data.samples import CorpusLoader
from heddle.errors import DataError
from heddle.parts.layout import Layout

CALIBRATION_TOKENS = 2**16
CALIBRATION_BATCH = 16  # rows
SAMPLE_SEED = 0  # of the order of samples, of which calibration takes the first and healing the next


def calibration_samples(tokens: int, sequence_length: int) -> int:
    """How many samples a calibration on about `tokens` tokens reads; healing begins after them."""
    rows = -(-tokens // sequence_length)
    batch_rows = min(rows, CALIBRATION_BATCH)
    return -(-rows // batch_rows) * batch_rows


def calibration_from_corpus(corpus: Corpus, tokens: int, sequence_length: int, device: str = "cpu") -> CalibrationText:
    """The first `tokens` tokens of a corpus's training text in the order of seed 0, in rows of `sequence_length`.

    Each row begins as the corpus says; BOS tokens count as tokens.
    Raises DataError, which says how much is needed, if the text is shorter.
    """
    rows = -(-tokens // sequence_length)
    batch_rows = min(rows, CALIBRATION_BATCH)
    eod_id = corpus.tokenizer.eod_id
    windows = sum((len(file) - 1) // sequence_length for file in corpus.train)
    if windows < 2 * rows:  # as much again is left to heal on
        raise DataError(
            f"the training text holds {windows} windows of {sequence_length} tokens, but {2 * rows} are needed: {rows} "
            "to calibrate on, and as many to heal on; give more text, or calibrate on fewer tokens"
        )
    loader = CorpusLoader(corpus.train, corpus.weights, sequence_length, batch_rows, SAMPLE_SEED, eod_id, corpus.rows)
    batches = [loader.batch(step) for step in range(-(-rows // batch_rows))]
    inputs = [torch.from_numpy(batch.tokens[:, :-1].copy()).to(device) for batch in batches]
    layouts = [Layout.packed(batch.doc_lengths, sequence_length, device) for batch in batches]
    samples = calibration_samples(tokens, sequence_length)
    name = corpus.report.get("name", "text")
    return CalibrationText(inputs, layouts, name, corpus.hash, samples, corpus.rows)
