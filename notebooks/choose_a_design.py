# %% [markdown]
# # Choose a design
#
# A design is data. Before anything is trained, heddle says what it costs: parameters, operations for each token, and
# the state that decoding carries along. This notebook asks what three other mixers would change in a small model.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("heddle") is None:  # on Colab
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "heddle-lm"], check=True)

# %%
import torch

import heddle

config = heddle.load_config("preset:gqa-tiny", overrides=["vocab_size=4096"])
config

# %% [markdown]
# The cost at 8,192 tokens. The state is what a server keeps for each text.

# %%
heddle.size(config, context_length=8192)

# %% [markdown]
# ## Other mixers
#
# Setting a part's `kind` keeps the fields that both kinds have; what the new kind needs is chosen from the old one.

# %%
designs = {
    "grouped-query": config,
    "windowed": heddle.load_config(config.dump(), ["layers.*.mixer.window=512"]),
    "latent": heddle.load_config(config.dump(), ["layers.*.mixer.kind=mla"]),
    "recurrent": heddle.load_config(config.dump(), ["layers.*.mixer.kind=gated_delta"]),
}
for name, design in designs.items():
    short, long = (heddle.size(design, context_length=length) for length in (2048, 32768))
    print(f"{name:14} {short.parameters:>9,} parameters, {long.flops_per_token:.3g} FLOPs for each token of 32,768")
    print(f"{'':14} state: {short.state_bytes:>10,} bytes at 2,048 tokens, {long.state_bytes:>11,} at 32,768")

# %% [markdown]
# A window and a recurrence bound the state; latent attention shrinks it and still sees every token.

# %%
states = {name: heddle.size(design, context_length=32768).state_bytes for name, design in designs.items()}
assert states["recurrent"] < states["windowed"] < states["latent"] < states["grouped-query"]

# %% [markdown]
# ## What attention looks at
#
# Any design is a model in one line. Before training its attention is nearly even; a window shows at once.

# %%
small = heddle.load_config(config.dump(), ["vocab_size=300", "layers.0.repeat=2", "layers.*.mixer.window=8"])
model = heddle.build(small, seed=0)
tokens = torch.randint(0, 300, (1, 32), generator=torch.Generator().manual_seed(0))
weights = heddle.attention_weights(model, tokens)
weights

# %%
assert weights[0] is not None
assert (weights[0][0, :, -1, :-8] == 0).all()  # the last token sees the eight newest alone
