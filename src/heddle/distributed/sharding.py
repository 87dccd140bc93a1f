"""Fully sharded data parallelism of a model, by torch's FSDP2: each layer is a group, the rest is the root group.

The root group holds embedding, last norm and head, so that a tied weight is in one group, and stays gathered between
the model's forward pass and its backward pass, because the loss reads the head's weight outside both. Layers that are
visited several times are part of it, too: torch allows the modules of one weight in one group alone. The encoder is
part of the root group; its layers are groups. What no gradient teaches, such as the balancing bias of experts, stays
whole on each rank. Gradients are summed over ranks, not averaged: the loss is divided by the targets of all ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from heddle.distributed.ranks import as_sharded, held_rows, is_sharded, local_part
from heddle.model.decoder import Decoder
from heddle.model.embedding import Head
from heddle.model.initialization import initialize_module
from heddle.parts.modules.linear import fill_rows

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded.

    product_dtype: weights are gathered, and layers compute, in this dtype; None: in that of the parameters.
    reduce_dtype: of gradients on their way; None: that of the parameters. reshard: gathered weights of a layer are
    freed after its forward pass. offload: shards, gradients and moments lie in the host's memory.
    """

    product_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard: bool = True
    offload: bool = False


def shard_model(model: Decoder, mesh: "DeviceMesh", sharding: Sharding | None = None) -> Decoder:
    """Shard a model in place over `mesh`: one dimension (shard), or two (replicate, shard). Returns the model.

    The model may be on the meta device; `initialize_shards` then fills it. Compile layers and add adapters before.
    """
    from torch.distributed.fsdp import (  # a second, which trainings on one process save
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    sharding = sharding or Sharding()
    precision = MixedPrecisionPolicy(
        param_dtype=sharding.product_dtype, reduce_dtype=sharding.reduce_dtype, cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy() if sharding.offload else OffloadPolicy()
    whole = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    stacks = [model] if model.encoder is None else [model, model.encoder]
    for layer in (layer for stack in stacks if stack.config.residual.stream_grows for layer in stack.layers):
        layer.register_forward_hook(_without_views)
    groups: list[nn.Module] = [
        layer
        for stack in stacks
        for layer, is_looped in zip(stack.layers, stack.config.looped_layers, strict=True)
        if not is_looped
    ]
    groups += [module for stack in stacks for module in stack.multi_token]
    for group in (*groups, model):
        own_parameters = set(group.parameters())
        fully_shard(
            group,
            mesh=mesh,
            reshard_after_forward=sharding.reshard if group is not model else False,
            mp_policy=precision,
            offload_policy=offload,
            ignored_params=whole & own_parameters,
        )
        sharded = cast("FSDPModule", group)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # every backend can sum
    if model.encoder is not None:
        register_fsdp_forward_method(model, "encode")
    return model


class _SameStorage(torch.autograd.Function):
    """Tensors with the storages of others, which autograd does not call views of them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def _without_views(_layer: nn.Module, _inputs: Any, output: tuple[Any, Any]) -> Any:
    """A layer's output without views: what enters a sharded layer is one, and FSDP warns of those that leave it."""
    stream, state = output
    passed = [tensor for tensor in stream if tensor.requires_grad]
    if not passed:
        return output
    own = iter(_SameStorage.apply(*passed))
    return tuple(next(own) if tensor.requires_grad else tensor for tensor in stream), state


def reshard(model: Decoder) -> None:
    """Free the gathered weights of the root group, which a forward pass without a backward pass leaves in place."""
    if is_sharded(model):
        cast("FSDPModule", model).reshard()


# First weights of a sharded model: each rank draws the rows that it holds, with the bits that one process draws.


def initialize_shards(model: Decoder, seed: int, device: torch.device | str = "cpu") -> None:
    """Allocate and initialize a model that was sharded on the meta device, in the dtypes that it was built in.

    One module at a time is initialized on a whole copy of its parameters, of which the pages of other ranks' rows are
    never touched. Shared weights stay shared.
    """
    model.to_empty(device=torch.device(device))
    model.tie()
    for name, module in model.own_modules():
        shards = dict(module.named_parameters(recurse=False))
        if not shards:
            continue
        whole = {each: torch.empty(p.shape, dtype=p.dtype, device="cpu") for each, p in shards.items()}
        parameters = {each: nn.Parameter(values, requires_grad=False) for each, values in whole.items()}
        rows = {id(parameters[each]): held_rows(shard) for each, shard in shards.items()}
        try:
            for each, parameter in parameters.items():
                setattr(module, each, parameter)
            with fill_rows(rows):
                initialize_module(model, name, module, seed)
        finally:
            for each, shard in shards.items():
                setattr(module, each, shard)
        if isinstance(module, Head) and module.tied:
            del shards["weight"]  # the embedding's, which is initialized there
        with torch.no_grad():
            for each, shard in shards.items():
                local_part(shard).copy_(parameters[each].detach()[held_rows(shard)])


# Work on whole matrices whose rows lie on several ranks: each matrix has one owner, which computes it for all.


Compute = Callable[[Tensor], Tensor]  # of [m, rows, columns], to the same shape and dtype


def owner_count(matrix: Tensor) -> int:
    """How many ranks can own a matrix: all that hold rows of it, or copies of them."""
    sharded = as_sharded(matrix)
    return 1 if sharded is None else sharded.device_mesh.size()


def compute_on_owners(matrix: Tensor, parts: Tensor, compute: Compute, first: int = 0) -> Tensor:
    """Return this rank's rows of compute(whole matrices), [n, rows of this rank, columns].

    matrix: one of n matrices [rows, columns] that are placed alike. parts: [n, rows of this rank, columns], what this
    rank holds of each. first: the owner of matrix i is rank (first + i) modulo their number. All ranks call this at
    once. Rows move to their owner and back in one exchange each; where ranks hold copies, each set of ranks computes
    its share of the matrices, and a third exchange tells the others.
    """
    sharded = as_sharded(matrix)
    if sharded is None or sharded.device_mesh.size() == 1:
        return compute(parts)
    mesh = sharded.device_mesh
    shard_dim = next(dim for dim, placement in enumerate(sharded.placements) if placement.is_shard())
    copies = mesh.size() // mesh.size(shard_dim)
    copy = mesh.get_local_rank(1 - shard_dim) if copies > 1 else 0
    own = [index for index in range(len(parts)) if (first + index) % copies == copy]
    result = _compute_shards(sharded, shard_dim, parts.to(mesh.device_type)[own], compute, first // copies)
    if copies > 1:
        padded = result.new_zeros((-(-len(parts) // copies), *result.shape[1:]))
        padded[: len(own)] = result
        gathered = [torch.empty_like(padded) for _ in range(copies)]
        torch.distributed.all_gather(gathered, padded, group=mesh.get_group(1 - shard_dim))
        result = torch.stack([gathered[(first + index) % copies][index // copies] for index in range(len(parts))])
    return result.to(parts.device)


def _compute_shards(sharded: "DTensor", dim: int, parts: Tensor, compute: Compute, first: int) -> Tensor:
    """The same where the ranks of one dimension of the mesh hold all rows between them."""
    mesh, (rows, columns) = sharded.device_mesh, sharded.shape
    count, rank = mesh.size(dim), mesh.get_local_rank(dim)
    size = -(-rows // count)
    heights = [min(size, max(0, rows - start)) for start in range(0, count * size, size)]
    owned = [[index for index in range(len(parts)) if (first + index) % count == owner] for owner in range(count)]
    own = len(owned[rank])

    def exchange(pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send a piece to each rank and receive one of sizes[rank] numbers from each."""
        received = parts.new_empty(sum(sizes))
        sent = torch.cat([piece.reshape(-1) for piece in pieces])
        lengths = [piece.numel() for piece in pieces]
        torch.distributed.all_to_all_single(received, sent, list(sizes), lengths, group=mesh.get_group(dim))
        return list(received.split(list(sizes)))

    received = exchange([parts[indices] for indices in owned], [own * height * columns for height in heights])
    shards = [piece.view(own, height, columns) for piece, height in zip(received, heights, strict=True)]
    computed = compute(torch.cat(shards, dim=1)) if own else parts.new_empty(0, rows, columns)
    returned = exchange(computed.split(heights, dim=1), [len(indices) * heights[rank] * columns for indices in owned])
    result = torch.empty_like(parts)
    for indices, piece in zip(owned, returned, strict=True):
        result[indices] = piece.view(len(indices), heights[rank], columns)
    return result
