"""Print the loss of each token of each row for `heddle judge`."""

import json
import os

import numpy as np
import torch
from model import build

model = build(dict(os.environ))
model.load_state_dict(torch.load("model.pt"))
with torch.no_grad():
    for rows in torch.from_numpy(np.load(os.environ["HEDDLE_ROWS"])).split(64):
        for losses in model.losses(rows).tolist():
            print(json.dumps(losses))
