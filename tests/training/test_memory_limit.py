"""A training that the device cannot hold is refused before anything is allocated."""

import re
from pathlib import Path

import pytest

from heddle.data.corpus import Corpus
from heddle.errors import MachineError
from heddle.training import job as memory_limit
from heddle.training.loop import train
from tests import small


@pytest.mark.parametrize("precision", ["fp32", "bf16-params"])
def test_a_design_beyond_the_memory_is_refused(texts: Corpus, tmp_path: Path, precision: str) -> None:
    wide = small.design(width=2**18)
    with pytest.raises(MachineError, match=r"^design: [0-9,]+.*GB"):
        train(small.job(texts, tmp_path, wide, precision=precision))


def test_the_bytes_of_a_parameter_are_counted(texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = small.job(texts, tmp_path, steps=1)
    monkeypatch.setattr(memory_limit, "device_memory", lambda _: 1)
    with pytest.raises(MachineError) as refusal:
        memory_limit.check_memory(job)
    counted = int(re.findall(r"[0-9,]+", str(refusal.value))[0].replace(",", ""))
    assert counted == sum(parameter.numel() for parameter in job.build_model().parameters())
    monkeypatch.setattr(memory_limit, "device_memory", lambda _: 12 * counted)
    memory_limit.check_memory(job)
