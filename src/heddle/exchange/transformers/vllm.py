"""The plugin for vLLM, whose entry point `vllm.general_plugins` calls `register` in each of vLLM's processes.

vLLM's backend for transformers models then runs HeddleForCausalLM: vLLM provides cache, batching and attention, heddle
everything else. It can run designs of softmax attention only; `external_attention.unsupported_reasons` says why not.
"""

from heddle.exchange.transformers.modeling import HeddleForCausalLM

MODEL_CLASS = "heddle.exchange.transformers.vllm_model:VLLMHeddleForCausalLM"


def register() -> None:
    """Register HeddleForCausalLM with vLLM; a second call does nothing."""
    from vllm import ModelRegistry

    name = HeddleForCausalLM.__name__
    if name not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(name, MODEL_CLASS)
