"""A stand-in for vLLM on one CPU: it treats a model of transformers as vLLM's documentation and source say.

Built on the meta device with `_attn_implementation` "vllm"; each Linear, the rows of the embedding and the head are
replaced; each layer has a cache of keys and values of its own by request; a call holds new tokens of all requests one
after another, in a batch of one, without a mask and without a cache of transformers.
"""

import sys
from collections.abc import Iterable
from inspect import signature
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel
from transformers.modeling_utils import AttentionInterface


class Registry:
    """ModelRegistry, as far as plug-ins use it."""

    classes: dict[str, str] = {}  # noqa: RUF012 - one registry a process

    @classmethod
    def get_supported_archs(cls) -> set[str]:
        return set(cls.classes)

    @classmethod
    def register_model(cls, name: str, model: str) -> None:
        assert name not in cls.classes
        cls.classes[name] = model


class Replicated(nn.Module):
    """In the place of a Linear: it has no `in_features`, and takes no functions of heddle."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(linear.weight.shape, dtype=linear.weight.dtype))
        self.bias = None if linear.bias is None else nn.Parameter(torch.empty_like(self.weight[:, 0]))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class Rows(nn.Module):
    """In the place of the embedding; a second argument is too many."""

    def __init__(self, count: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width, dtype=dtype))
        self.bias: nn.Parameter | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weight)


class Paged:
    """The attention of one layer: what each request's tokens are, and which requests the next call holds."""

    def __init__(self, config: Any, index: int) -> None:
        self.impl = SimpleNamespace(scale=config.head_dim**-0.5)
        self.heads, self.groups, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        sliding = config.layer_types[index] == "sliding_attention"
        self.window = config.sliding_window if sliding else None
        self.cached: dict[int, tuple[Tensor, Tensor]] = {}
        self.calls: list[tuple[int, int]] = []  # request, new tokens

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [tokens, heads · d], k and v [tokens, groups · d]."""
        out, start = [], 0
        for request, length in self.calls:
            new = [x[start : start + length].view(length, -1, self.dim).transpose(0, 1) for x in (q, k, v)]
            start += length
            cached = self.cached.get(request, (new[1][:, :0], new[2][:, :0]))
            keys, values = (torch.cat(pair, dim=1) for pair in zip(cached, new[1:], strict=True))
            self.cached[request] = keys, values
            keys, values = (x.repeat_interleave(self.heads // self.groups, dim=0) for x in (keys, values))
            here = torch.arange(keys.shape[1])
            distance = here[-length:, None] - here
            seen = (distance >= 0) & (distance < (self.window or len(here)))
            scores = (new[0] @ keys.mT * self.impl.scale).masked_fill(~seen, float("-inf"))
            out.append((scores.softmax(-1) @ values).transpose(0, 1).reshape(length, -1))
        return torch.cat(out)


def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """The function that "vllm" names."""
    assert mask is None
    paged = kwargs["attention_instances"][module.layer_idx]
    paged.impl.scale = float(kwargs["scaling"])
    assert q.shape[0] == 1
    return paged.forward(*(x.transpose(1, 2).reshape(q.shape[-2], -1) for x in (q, k, v))), None


class TransformersForCausalLM(nn.Module):
    """The backend: a model of transformers without its head."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.config._attn_implementation = "vllm"
        with torch.device("meta"):
            self.model: Any = AutoModel.from_config(self.config, dtype=torch.float64)
        assert self.model._supports_attention_backend
        compiled = signature(type(self.model.get_decoder()).forward).parameters
        assert {"input_ids", "inputs_embeds", "position_ids"} <= set(compiled), "vLLM's compiler looks for these"
        self._replace(self.model)
        sizes = self.config.vocab_size, self.config.hidden_size
        with torch.device("cpu"):
            self.model.set_input_embeddings(Rows(*sizes, torch.float64))
            self.lm_head: Any = Rows(*sizes, torch.float64)
        assert isinstance(self.model.get_input_embeddings(), Rows)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.get_input_embeddings().weight
        for module in self.model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:
                    setattr(module, name, nn.Parameter(torch.empty_like(parameter, device="cpu")))
        self.paged = {index: Paged(self.config, index) for index in range(self.config.num_hidden_layers)}

    def _replace(self, module: nn.Module) -> None:
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                with torch.device("cpu"):
                    setattr(module, name, Replicated(child))
            else:
                self._replace(child)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        named = dict(self.named_parameters())
        filled = set()
        for name, tensor in weights:
            if name == "lm_head.bias":
                self.lm_head.bias = nn.Parameter(tensor.clone())
            else:
                named[name].data.copy_(tensor)
                filled.add(name)
        assert filled == set(named), "a parameter was not filled"
        return filled

    def forward(self, tokens: list[tuple[int, list[int]]]) -> dict[int, Tensor]:
        """New tokens of requests -> logits [new, vocab] of each."""
        positions: list[int] = []
        for request, new in tokens:
            cached = self.paged[0].cached.get(request)
            start = 0 if cached is None else cached[0].shape[1]
            positions += range(start, start + len(new))
        for paged in self.paged.values():
            paged.calls = [(request, len(new)) for request, new in tokens]
        hidden = self.model(
            input_ids=torch.tensor([[token for _, new in tokens for token in new]]),
            inputs_embeds=None,
            use_cache=False,
            position_ids=torch.tensor([positions]),
            attention_instances=self.paged,
            return_dict=False,
        )[0][0]
        cap = getattr(self.config, "final_logit_softcapping", None)
        logits = functional.linear(hidden, self.lm_head.weight, self.lm_head.bias)
        logits = logits if cap is None else torch.tanh(logits / cap) * cap
        logits = logits * getattr(self.config, "logit_scale", 1.0)
        parts = logits.split([len(new) for _, new in tokens])
        return {request: part for (request, _), part in zip(tokens, parts, strict=True)}


def install(patch: pytest.MonkeyPatch) -> None:
    """Make `import vllm` find this for the time of a test."""
    names = ["vllm", "vllm.model_executor", "vllm.model_executor.models", "vllm.model_executor.models.transformers"]
    for name in names:
        patch.setitem(sys.modules, name, ModuleType(name))
    patch.setattr(sys.modules["vllm"], "ModelRegistry", Registry, raising=False)
    patch.setattr(sys.modules[names[-1]], "TransformersForCausalLM", TransformersForCausalLM, raising=False)
    patch.setattr(Registry, "classes", {})
    AttentionInterface.register("vllm", attention)
