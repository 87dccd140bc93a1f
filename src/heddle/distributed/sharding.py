"""Fully sharded data parallelism of a model, by torch's FSDP2: each layer is a group, the rest is the root group.

The root group holds embedding, last norm and head, so that a tied weight is in one group, and stays gathered between
the model's forward pass and its backward pass, because the loss reads the head's weight outside both. Looped layers are
also part of it: torch allows the modules that share a weight in only one group. The encoder is part of the root group;
its layers are groups. Parameters without gradients, such as the balancing bias of experts, stay whole on each rank.
Gradients are summed over ranks, not averaged: the loss is divided by the targets of all ranks.
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

    product_dtype: weights are gathered, and layers compute, in this dtype; None: the parameters' dtype. reduce_dtype:
    gradients are reduced in this dtype; None: the parameters' dtype. reshard: free a layer's gathered weights after its
    forward pass. offload: keep shards, gradients and moments in host memory.
    """

    product_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard: bool = True
    offload: bool = False


def shard_model(model: Decoder, mesh: "DeviceMesh", sharding: Sharding | None = None) -> Decoder:
    """Shard a model in place over `mesh`: one dimension (shard), or two (replicate, shard). Returns the model.

    The model may be on the meta device; `initialize_shards` then fills it. Compile layers and add adapters first.
    """
    from torch.distributed.fsdp import (  # takes a second, which one process does not need
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
    """Returns tensors with the same storage that autograd does not treat as views."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def _without_views(_layer: nn.Module, _inputs: Any, output: tuple[Any, Any]) -> Any:
    """Return a layer's output without views: a sharded layer's inputs are views, and FSDP warns if one leaves it."""
    stream, state = output
    passed = [tensor for tensor in stream if tensor.requires_grad]
    if not passed:
        return output
    own = iter(_SameStorage.apply(*passed))
    return tuple(next(own) if tensor.requires_grad else tensor for tensor in stream), state


def reshard(model: Decoder) -> None:
    """Free the gathered weights of the root group, which stay after a forward pass without a backward pass."""
    if is_sharded(model):
        cast("FSDPModule", model).reshard()


# Initial weights of a sharded model: each rank draws its own rows, bit-equal to one process.


def initialize_shards(model: Decoder, seed: int, device: torch.device | str = "cpu") -> None:
    """Allocate and initialize a model that was sharded on the meta device, in the dtypes that it was built with.

    One module at a time is initialized on a whole copy of its parameters; memory pages with only other ranks' rows are
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


# Work on whole matrices with rows on several ranks: one rank, the owner, computes a matrix for all.


Compute = Callable[[Tensor], Tensor]  # of [m, rows, columns], to the same shape and dtype


def owner_count(matrix: Tensor) -> int:
    """Return the number of ranks that can own a matrix: all ranks with rows of it, or copies of rows."""
    sharded = as_sharded(matrix)
    return 1 if sharded is None else sharded.device_mesh.size()


def compute_on_owners(matrix: Tensor, parts: Tensor, compute: Compute, first: int = 0) -> Tensor:
    """Return this rank's rows of compute(whole matrices), [n, rows of this rank, columns].

    matrix: one of n matrices [rows, columns] with the same placement. parts: [n, rows of this rank, columns], this
    rank's rows of each. first: the owner of matrix i is rank (first + i) modulo the number of ranks. Collective. Rows
    move to their owner and back with one all-to-all each; if ranks hold copies, each set of ranks computes its share of
    the matrices, and an all-gather shares the results.
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
    """The same for ranks of one mesh dimension that together hold all rows."""
    mesh, (rows, columns) = sharded.device_mesh, sharded.shape
    count, rank = mesh.size(dim), mesh.get_local_rank(dim)
    size = -(-rows // count)
    heights = [min(size, max(0, rows - start)) for start in range(0, count * size, size)]
    owned = [[index for index in range(len(parts)) if (first + index) % count == owner] for owner in range(count)]
    own = len(owned[rank])

    def exchange(pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send a piece to each rank and receive sizes[rank] elements from each."""
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
