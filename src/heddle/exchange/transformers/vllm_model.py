"""What vLLM runs: its backend for models of transformers around HeddleModel, whose head is vLLM's own."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.models.transformers import TransformersForCausalLM

HEAD = "model.decoder.head."


class ServedHeddle(TransformersForCausalLM):
    """vLLM puts its own rows and head in place of ours; the head's weights stand in our files under our name."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.model.decoder.head = nn.Identity()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Names of parameters that were filled, of (name, tensor) as our folders have them."""
        renamed = (
            (f"lm_head.{name.removeprefix(HEAD)}" if name.startswith(HEAD) else name, tensor)
            for name, tensor in weights
        )
        filled: set[str] = super().load_weights(renamed)
        return filled
