"""The model class that vLLM runs: its backend for transformers models around HeddleModel."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.models.transformers import TransformersForCausalLM

HEAD_PREFIX = "model.decoder.head."


class VLLMHeddleForCausalLM(TransformersForCausalLM):
    """vLLM replaces the embedding and the head by its own, so the head's weights are loaded under vLLM's name."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.model.decoder.head = nn.Identity()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load (name, tensor) pairs of a heddle folder. Returns the names of the parameters that were loaded."""
        renamed = (
            (f"lm_head.{name.removeprefix(HEAD_PREFIX)}" if name.startswith(HEAD_PREFIX) else name, tensor)
            for name, tensor in weights
        )
        loaded: set[str] = super().load_weights(renamed)
        return loaded
