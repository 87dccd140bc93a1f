"""A callback of transformers' Trainer that updates the expert biases of designs with `bias_update`."""

from typing import Any

from accelerate.utils import reduce
from transformers import TrainerCallback

from heddle.exchange.transformers.modeling import HeddleForCausalLM


class BalanceExperts(TrainerCallback):
    """Use it as `Trainer(..., callbacks=[BalanceExperts()])`. It sums the expert counts of all processes."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Update the expert biases."""
        for module in model.modules():
            if isinstance(module, HeddleForCausalLM):
                for mixture, counts in module.expert_counts.items():
                    module.expert_counts[mixture] = reduce(counts, "sum")
                module.balance_experts()
