# %% [markdown]
# # Convert a model
#
# A trained model gets fewer key/value heads: train a small one, convert it, heal it, and compare the three. In a
# terminal these are `heddle train` and `heddle convert`; here they run in the notebook.

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
from heddle.cli.main import run_command

folder = Path(tempfile.mkdtemp())
text = folder / "text.txt"
lines = (f"thread {i} of {j} goes over {i * j % 7} and under {j}.\n" for i in range(40) for j in range(40))
text.write_text("".join(lines))

# %% [markdown]
# ## Train

# %%
small = ["width=32", "layers.0.repeat=2", "layers.0.feedforward.hidden=48"]
budget = {"batch_size": 8, "sequence_length": 32, "lr": 0.01, "quiet": True}
run = heddle.train(
    "preset:mha-tiny", small, data=[str(text)], vocab_size=300, steps=60, out=str(folder / "run"), **budget
)
run

# %% [markdown]
# ## Convert
#
# Four key/value heads become two: each new head is the mean of two old ones. The config says so, the weights follow.

# %%
converted = folder / "converted"
rewrite = ["--to", "kv_heads=2,groups=contiguous,merge=mean", "--report-tokens", "2048"]
assert run_command(["convert", str(folder / "run"), str(converted), *rewrite]) == 0
model, _ = heddle.load(converted)
model.config

# %% [markdown]
# ## Heal
#
# Averaged heads are worse than trained ones. A short training from the converted weights wins most of it back.

# %%
healed = heddle.train(from_=str(converted), data=[str(text)], steps=30, out=str(folder / "healed"), **budget)
scores = {"trained": run.report["bits_per_byte"], "converted and healed": healed.report["bits_per_byte"]}
scores

# %% [markdown]
# ## What it saves
#
# Half the state in decoding, for each text that a server holds.

# %%
before, after = (heddle.size(each.model.config, context_length=2048) for each in (run, healed))
print(f"state at 2,048 tokens: {before.state_bytes:,} -> {after.state_bytes:,} bytes")
assert after.state_bytes < 0.6 * before.state_bytes
print(healed.generate("thread 3 of", max_new_tokens=24))
