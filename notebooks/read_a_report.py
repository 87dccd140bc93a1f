# %% [markdown]
# # Read a report
#
# `heddle.compare` trains designs on the same text in the same order, with several seeds, and says what the difference
# is and how sure that is. This notebook makes a report that is too small to decide anything, and reads it.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("heddle") is None:  # on Colab
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "heddle-lm"], check=True)

# %%
import tempfile
from pathlib import Path

import heddle

folder = Path(tempfile.mkdtemp())
text = folder / "text.txt"
lines = (f"thread {i} of {j} goes over {i * j % 7} and under {j}.\n" for i in range(60) for j in range(60))
text.write_text("".join(lines))

# %%
result = heddle.compare(
    "preset:mha-tiny",
    "preset:mqa-tiny",
    "width=32",
    "layers.0.repeat=2",
    "layers.0.feedforward.hidden=48",
    data=[str(text)],
    vocab_size=300,
    tokens=8000,
    batch_size=8,
    sequence_length=32,
    lr=0.01,
    seeds=2,
    recall="none",
    extrapolate=1,
    speed_context_length=[64],
    out=str(folder / "comparison"),
    quiet=True,
)
result

# %% [markdown]
# ## Bits per byte, with its uncertainty
#
# Lower is better. Bits per byte do not depend on the tokenizer. The interval is over seeds: with two it is wide.

# %%
for design in result.report["designs"]:
    quality = design["bits_per_byte"]
    print(f"{design['name']:10} {design['parameters']:>7,} parameters, {quality['mean']:.4f} bits per byte")

# %% [markdown]
# ## The verdict
#
# It names a difference only where the interval excludes zero. "Not resolved" means that more seeds are needed:
# `until_resolved=0.01` adds seeds until each difference is known to ± 0.01.

# %%
print("\n".join(result.report["verdict"]))

# %% [markdown]
# ## The page
#
# `report.html` has the curves, the cost beside the quality, and every setting. It loads nothing from the network.

# %%
report = folder / "comparison" / "report.html"
assert report.stat().st_size > 100_000
print(report)
