"""First weights of a sharded model: each rank draws the rows that it holds, with the bits that one process draws."""

import torch
from torch import nn

from heddle.distributed.ranks import held_rows, local_part
from heddle.model.decoder import Decoder
from heddle.model.embedding import Head
from heddle.model.initialization import initialize_module
from heddle.parts.modules.linear import fill_rows


def initialize_shards(model: Decoder, seed: int, device: torch.device | str = "cpu") -> None:
    """Allocate and initialize a model that was sharded on the meta device, in the dtypes that it was built in.

    One module at a time is initialized on a whole copy of its parameters, of which the pages of other ranks' rows are
    never touched. A tied head stays tied.
    """
    model.to_empty(device=torch.device(device))
    model.tie()
    for name, module in model.named_modules():
        shards = dict(module.named_parameters(recurse=False))
        if not shards:
            continue
        whole = {each: torch.empty(p.shape, dtype=p.dtype, device="cpu") for each, p in shards.items()}
        parameters = {each: nn.Parameter(values, requires_grad=False) for each, values in whole.items()}
        rows = {id(parameters[each]): held_rows(shard) for each, shard in shards.items()}
        try:
            for each, parameter in parameters.items():
                module._parameters[each] = parameter
            with fill_rows(rows):
                initialize_module(model, name, module, seed)
        finally:
            for each, shard in shards.items():
                module._parameters[each] = shard
        if isinstance(module, Head) and module.tied:
            del shards["weight"]  # the embedding's, which is initialized there
        with torch.no_grad():
            for each, shard in shards.items():
                local_part(shard).copy_(parameters[each].detach()[held_rows(shard)])
