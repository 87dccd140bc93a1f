"""Worker process of `heddle bench`: `python -m heddle.lab.bench.worker`, which runs the workload of one side.

A line of JSON on standard input is a request, one on standard output its answer: {"seconds": …}, {"values": …} or
{"error": …}."""

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from heddle.errors import HeddleError, is_out_of_memory

if TYPE_CHECKING:
    from heddle.lab.bench.run import Prepared


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps output of libraries out of the answers
    side: Side | None = None
    answer: dict[str, Any]
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if side is None:
                side = Side(request)
            if "workload" in request:
                answer = {"values": side.prepare(*request["workload"])}
            else:
                answer = {"seconds": side.seconds()}
        except HeddleError as error:
            answer = {"error": str(error), "exit_code": error.exit_code}
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            answer = {"error": "out of memory; choose smaller sizes", "exit_code": 1}
        print(json.dumps(answer), file=answers, flush=True)


class Side:
    """A design computed by heddle or transformers, in a process that is set up like the command line or not."""

    def __init__(self, request: dict[str, Any]) -> None:
        """request: design, precision, device, threads, choices, part_files, and the side's name."""
        import torch

        from heddle.config import load_part
        from heddle.lab.bench.run import DEFAULTS
        from heddle.model.load_config import load_config
        from heddle.runtime import Choices, set_up_runtime

        for file in request["part_files"]:
            load_part(file)
        self.name, self.precision, self.device = request["side"], request["precision"], request["device"]
        if self.name == DEFAULTS:
            torch.set_num_threads(request["threads"])
        else:
            set_up_runtime(self.device, request["threads"], choices=Choices.read(request["choices"]))
        self.config = load_config(request["design"])
        self.prepared: Prepared | None = None
        self.repetitions = 1

    def prepare(self, kind: str, rows: int, length: int) -> list[float]:
        """Prepare a workload and run it once to warm up. Returns the values that other sides must reproduce."""
        from heddle.lab.bench.run import HEDDLE, TOKEN, TOKENS, Workload, prepare_heddle, prepare_transformers

        self.prepared = None  # frees the last model before the next is built
        workload = Workload(kind, rows, length)
        self.repetitions = TOKENS if kind == TOKEN else 1
        if self.name == HEDDLE:
            self.prepared = prepare_heddle(self.config, workload, self.precision, self.device)
        else:
            from heddle.exchange.transformers.peer import transformers_model

            model = transformers_model(self.config).to(self.device)
            self.prepared = prepare_transformers(model, self.config, workload, self.precision)
        self.seconds()
        return self.prepared.values

    def seconds(self) -> float:
        """The seconds of running the workload once; per token when decoding."""
        from heddle.runtime import synchronize

        assert self.prepared is not None
        argument = self.prepared.before()
        synchronize(self.device)
        began = time.perf_counter()
        self.prepared.run(argument)
        synchronize(self.device)
        return (time.perf_counter() - began) / self.repetitions


if __name__ == "__main__":
    main()
