"""Train the model for `heddle judge`: reads training tokens, writes model.pt."""

import os

import numpy as np
import torch
from model import build

LR, BATCH, WARMUP, CLIP = 1e-3, 4, 10, 1.0
WEIGHT_DECAY = 0.1

length, tokens = int(os.environ["HEDDLE_SEQUENCE_LENGTH"]), int(os.environ["HEDDLE_TOKENS"])
text = torch.from_numpy(np.load(os.environ["HEDDLE_TRAIN"]).astype(np.int64))
model = build(dict(os.environ))
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
draw = np.random.default_rng(int(os.environ["HEDDLE_SEED"]))
steps = max(1, tokens // (BATCH * length))
for step in range(steps):
    starts = draw.integers(0, len(text) - length, BATCH)
    loss = model.losses(torch.stack([text[start : start + length + 1] for start in starts])).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.param_groups[0]["lr"] = LR * min((step + 1) / WARMUP, 1 - step / steps)
    optimizer.step()
torch.save(model.state_dict(), "model.pt")
