"""mergekit: the mean of two exports, by its command, as a Llama that heddle reads."""

import subprocess
import sys
from pathlib import Path

import torch

from heddle.exchange.load import load
from tests.clients.folders import folder_of, run_client

CONFIG = """
merge_method: linear
dtype: float32
models:
  - model: FIRST
    parameters: {weight: 0.75}
  - model: SECOND
    parameters: {weight: 0.25}
"""


def main(work: Path) -> str:
    """Merge, load, and compare each weight with the weighted mean."""
    first, second = folder_of("llama", work, seed=1), folder_of("llama", work, seed=2)
    (work / "merge.yaml").write_text(CONFIG.replace("FIRST", str(first)).replace("SECOND", str(second)))
    program = Path(sys.executable).with_name("mergekit-yaml")
    command = [str(program), str(work / "merge.yaml"), str(work / "merged"), "--no-cuda", "--allow-crimes"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    merged, *both = (load(folder).model for folder in (work / "merged", first, second))
    count = 0
    for name, parameter in merged.named_parameters():
        mean = 0.75 * both[0].get_parameter(name) + 0.25 * both[1].get_parameter(name)
        torch.testing.assert_close(parameter, mean, rtol=0, atol=1e-6)
        assert not torch.allclose(parameter, both[0].get_parameter(name)) or parameter.dim() == 1, name
        count += 1
    return f"{count} weights are the weighted means of two exports'"


if __name__ == "__main__":
    run_client(main, "mergekit")
