"""An import needs the memory of the model and of little more, also where its experts are many small tensors."""

import os
import subprocess
import sys
from pathlib import Path

import heddle
from heddle.config import parse_config
from heddle.exchange.export import export
from heddle.exchange.load import load
from heddle.model.config import ModelConfig
from heddle.model.load_config import DEFAULTS
from heddle.progress import quiet

FIXED = 40 * 2**20  # of the first use of code and of the allocator, whatever the model's size
SHARD = 30_000_000

MEASURE = f"""
import sys
from {load.__module__} import load
from {quiet.__module__} import quiet
def held(what):
    with open("/proc/self/status") as lines:  # resource's figure begins with that of the process which started this
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))
with quiet():
    load(sys.argv[1])
    before = held("VmRSS")
    kept = load(sys.argv[2])
print(held("VmHWM") - before, sum(p.numel() * p.element_size() for p in kept.model.parameters()))
"""


def write_model(folder: Path, hidden: int, experts: int) -> None:
    """A folder in Mixtral's names."""
    mixer = {"kind": "attention", "heads": 8, "kv_heads": 2, "position": {"kind": "rope"}}
    moe = {"kind": "moe", "experts": experts, "top_k": 2, "hidden": hidden}
    layer = {"repeat": 3, "mixer": mixer, "feedforward": moe}
    data = DEFAULTS | {"vocab_size": 4096, "width": 512, "layers": [layer], "head": {"tied": False}}
    assert (
        export(heddle.build(parse_config(ModelConfig, data)), folder, max_shard_bytes=SHARD).family.model_type
        == "mixtral"
    )


def test_peak_of_an_import(tmp_path: Path) -> None:
    write_model(tmp_path / "small", 8, 2)
    write_model(tmp_path / "large", 160, 60)  # 540 tensors of 0.3 MB in experts, 210 MB in all
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    grown, size = map(int, done.stdout.split())
    assert 190e6 < size < 230e6
    assert 0.9 * size < grown <= 1.2 * size + FIXED
