"""Which source files must be read to follow an override, a decoding step or segment ids through the package?

    python tools/files_entered.py [--override] [--decode] [--segment-ids]

prints, for each option (default: all three), the files of src/heddle in the order they are entered:

--override     from `heddle show preset:gqa-tiny layers.0.mixer.window=N` to the config that has this window: files with
               a function that holds the override, its value, or data that contains the value; and those that hold
               the config in the trial build that follows
--decode       one greedy token of `heddle.generation.decode`, by a model of one GQA layer: every file entered, and
               those outside `parts/` and `numerics/`, which hold the layers' own code
--segment-ids  one training step on packed documents: files that hold the segment ids, in a layout, a mask or a tensor,
               and those that read them
"""

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

import heddle
from heddle.cli.main import run_command
from heddle.config import Config
from heddle.data.samples import Batch
from heddle.generation.decode import GenerationRequest, Sampler, decode
from heddle.lab import show
from heddle.model import load_config
from heddle.model.decoder import Decoder
from heddle.numerics.attention.mask import AttentionMask
from heddle.parts.layout import Layout
from heddle.settings import VerbSettings
from heddle.training.step import accumulate_gradients

PACKAGE = Path(heddle.__file__).parent
WINDOW = 7919  # a number that means nothing else in a config
SEGMENT_FIELDS = {
    "segment_ids", "dense_segment_ids", "call_segment_ids", "q_segment_ids", "k_segment_ids", "doc_lengths"
}  # fmt: skip
MAX_DEPTH = 12  # of nested data that is searched for a value


class FileTracer:
    """Files of the package whose functions run within the block, in order, up to the first call of `before`.

    Only calls for which `matches(frame)` holds are counted.
    """

    def __init__(
        self, matches: Callable[[FrameType], bool] = lambda frame: True, before: Callable[..., Any] | None = None
    ) -> None:
        self.files: list[str] = []
        self._matches, self._done = matches, False
        self._last_code = None if before is None else before.__code__

    def __enter__(self) -> "FileTracer":
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def add(self, frame: FrameType) -> None:
        """Record the file of a frame, if it is one of the package."""
        with contextlib.suppress(ValueError):
            file = str(Path(frame.f_code.co_filename).relative_to(PACKAGE))
            if file not in self.files:
                self.files.append(file)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        # Arguments are known at the call, other local variables at the return.
        self._done = self._done or frame.f_code is self._last_code
        if event not in ("call", "return") or self._done or frame.f_code.co_name == "<module>":
            return
        if frame.f_code.co_filename.startswith(str(PACKAGE)) and self._matches(frame):
            self.add(frame)


def contains(data: Any, matches: Callable[[Any], bool], depth: int = 0) -> bool:
    """Whether nested lists, dicts, configs and settings contain a value that `matches`."""
    if isinstance(data, Config | VerbSettings):
        data = vars(data)
    if isinstance(data, dict):
        data = list(data.values())
    if isinstance(data, list | tuple) and depth < MAX_DEPTH:
        return any(contains(item, matches, depth + 1) for item in data)
    return matches(data)


def override_files(before: Callable[..., Any]) -> list[str]:
    """Files that handle an override of the command line, before a function is called."""

    def is_override(value: Any) -> bool:
        return str(WINDOW) in value if isinstance(value, str) else isinstance(value, int) and value == WINDOW

    def holds_override(frame: FrameType) -> bool:
        return any(contains(value, is_override) for value in frame.f_locals.values())

    command = ["show", "preset:gqa-tiny", f"layers.0.mixer.window={WINDOW}", "--device", "cpu"]
    with contextlib.redirect_stdout(io.StringIO()), FileTracer(holds_override, before) as tracer:
        code = run_command(command)
    assert code == 0
    return tracer.files


def small_model() -> Decoder:
    """One layer of grouped-query attention and a gated feed-forward."""
    return heddle.build(heddle.load_config("preset:gqa-tiny", ["vocab_size=300", "layers.0.repeat=1"]))


def decode_files() -> list[str]:
    """Files entered for one new token, after prefill."""
    request = GenerationRequest(prompt_ids=[[1, 2, 3]], max_new_tokens=4, sampler=Sampler())
    steps = decode(small_model(), request, [False])
    next(steps), next(steps)  # the second step fills the caches that a model makes once
    with FileTracer() as tracer:
        next(steps)
    return tracer.files


def outside_layers(files: list[str]) -> list[str]:
    """The files that are not the layers' own code."""
    return [file for file in files if not file.startswith(("parts/", "numerics/"))]


def segment_id_files() -> tuple[list[str], list[str]]:
    """Files with a function that holds a layout, mask or tensor of segment ids, and those that read the ids from it.

    Of one training step, forward and backward, on two packed rows: one of two documents, one of a single document.
    """
    model, addresses = small_model(), set[int]()
    tokens = np.random.default_rng(0).integers(0, 300, (2, 13))
    batch = Batch(tokens, doc_lengths=((5, 7), (12,)), sample_indices=np.arange(2))

    def holds_segment_ids(frame: FrameType) -> bool:
        return any(
            isinstance(value, Layout | AttentionMask)
            or (isinstance(value, torch.Tensor) and value.numel() > 0 and value.data_ptr() in addresses)
            for value in frame.f_locals.values()
        )

    readers = FileTracer()
    with (
        recorded_reads(Layout, readers, addresses),
        recorded_reads(AttentionMask, readers, addresses),
        FileTracer(holds_segment_ids) as holders,
    ):
        accumulate_gradients(model, batch, (0, 0))
    return holders.files, readers.files


@contextlib.contextmanager
def recorded_reads(cls: type, tracer: FileTracer, addresses: set[int]) -> Iterator[None]:
    """Within the block, record each file that reads segment ids of a `cls`, and the address of each such tensor."""
    original: Any = cls.__getattribute__

    def getattribute(instance: Any, name: str) -> Any:
        value = original(instance, name)
        if name in SEGMENT_FIELDS and value is not None:
            tracer.add(sys._getframe(1))
            if isinstance(value, torch.Tensor):
                addresses.add(value.data_ptr())
        return value

    cls.__getattribute__ = getattribute  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        cls.__getattribute__ = original  # type: ignore[method-assign]


def print_files(title: str, files: list[str]) -> None:
    """One line with the count, then one line per file."""
    print(f"{title}: {len(files)} files")
    for file in files:
        print(f"  {file}")


def main() -> None:
    """Answer the questions that the options ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("--override", "--decode", "--segment-ids"):
        parser.add_argument(option, action="store_true")
    options = parser.parse_args()
    everything = not (options.override or options.decode or options.segment_ids)
    if options.override or everything:
        print_files("override, to the config", override_files(load_config._try_build))
        print_files("override, with the trial build", override_files(show.measure))
    if options.decode or everything:
        files = decode_files()
        print_files("decode", files)
        print_files("decode, outside parts/ and numerics/", outside_layers(files))
    if options.segment_ids or everything:
        holders, readers = segment_id_files()
        print_files("segment ids, held", holders)
        print_files("segment ids, read", readers)


if __name__ == "__main__":
    main()
