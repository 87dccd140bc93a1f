"""The plug-in of vLLM: its entry point `vllm.general_plugins` calls `register` in each of vLLM's processes.

vLLM's backend for models of transformers then runs HeddleForCausalLM, for designs of softmax attention alone:
`elsewhere.obstacles` tells why another cannot. Its caches, batches and attention are vLLM's; all else is heddle's.
"""

from heddle.exchange.transformers.modeling import HeddleForCausalLM

SERVED = "heddle.exchange.transformers.vllm_model:ServedHeddle"


def register() -> None:
    """Tell vLLM which class serves our architecture; again does nothing. Importing this registers with transformers."""
    from vllm import ModelRegistry

    name = HeddleForCausalLM.__name__
    if name not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(name, SERVED)
