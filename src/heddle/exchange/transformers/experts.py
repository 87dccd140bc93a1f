"""Mixtures of experts under transformers' Trainer: those that balance themselves are told their loads after a step."""

from typing import Any

from accelerate.utils import reduce
from transformers import TrainerCallback

from heddle.exchange.transformers.modeling import HeddleForCausalLM


class BalanceExperts(TrainerCallback):
    """For designs with `bias_update`: `Trainer(..., callbacks=[BalanceExperts()])`; loads of all processes count."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        """After each optimizer step."""
        for module in model.modules():
            if isinstance(module, HeddleForCausalLM):
                for mixture, loads in module.loads.items():
                    module.loads[mixture] = reduce(loads, "sum")
                module.balance_experts()
