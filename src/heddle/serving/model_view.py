"""What a reader of an answer may see of the model: the attention of its last step, and the size of its state."""

import copy
import threading
from collections.abc import Sequence
from typing import Any

import torch

from heddle.model.attention_maps import forward_with_weights
from heddle.model.config import describe
from heddle.model.decoder import Decoder, build
from heddle.numerics.attention.observer import Observation
from heddle.numerics.dispatch.transfer import to_device
from heddle.serving.requests import RequestError

MAX_TOKENS = 1024  # of a text whose attention is shown: each layer's weights of all its tokens are in memory at once
MAX_LENGTHS = 64
MAX_LENGTH = 2**20


class ModelView:
    """Looks into a model that another thread may be using."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        # Observing registers hooks, which must not see the calls of the other thread: the twin shares only tensors.
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self._twin = copy.deepcopy(model, shared).eval()
        self._meta_model = build(model.config, dtype=model.embed.weight.dtype, device="meta")
        self._lock = threading.Lock()

    def last_step(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """For each layer, what its last query attends to when it reads the tokens: `mixer`, and `heads` [H][T] or None.

        Raises RequestError for too many tokens.
        """
        if not 0 < len(tokens) <= MAX_TOKENS:
            raise RequestError(f"reply: the text has {len(tokens):,} tokens; attention is shown of 1 to {MAX_TOKENS:,}")
        heads: dict[int, list[list[float]]] = {}

        def keep_last(layer: int, observation: Observation) -> None:
            weights = observation.weights[0, :, -1].double().cpu()
            if weights.shape[1] == len(tokens):  # else its keys are not the text's tokens
                heads[layer] = [[round(weight, 4) for weight in row] for row in weights.tolist()]

        with self._lock:
            text = to_device(torch.tensor([list(tokens)], device="cpu"), self.model.embed.weight.device)
            forward_with_weights(self._twin, text, None, keep_last)
        mixers = [layer.mixer for _, layer in self.model.config.expand()]
        return [
            {"mixer": "none" if mixer is None else describe(mixer.dump()), "heads": heads.get(index)}
            for index, mixer in enumerate(mixers)
        ]

    def state_bytes(self, lengths: Sequence[int]) -> list[int]:
        """Bytes of the state of one text of so many tokens each, the table of positions included. Nothing is allocated.

        Raises RequestError for lengths that no text has.
        """
        is_valid = all(type(length) is int and 0 < length <= MAX_LENGTH for length in lengths)
        if not is_valid or not 0 < len(lengths) <= MAX_LENGTHS:
            raise RequestError(f"lengths: must be a list of 1 to {MAX_LENGTHS} numbers of tokens", "lengths")
        return [self._meta_model.init_state(1, length).bytes for length in lengths]
