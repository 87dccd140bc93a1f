"""Refit an attention layer's output projection on a text, by ridge regression on the outputs of another layer."""

import torch
from torch import Tensor

from heddle.conversion.activations import LayerActivations
from heddle.conversion.heads.merge import head_outputs
from heddle.conversion.heads.parameters import Parameters
from heddle.conversion.heads.statistics import batches, build_mixer
from heddle.parts.context.build import BuildContext
from heddle.parts.mixers.attention import AttentionConfig

RIDGE = 1e-3  # of the mean squared input of the projection


@torch.no_grad()
def fit_output(
    layer: Parameters, config: AttentionConfig, context: BuildContext, activations: LayerActivations
) -> dict[str, Tensor]:
    """The layer with W_o (and its bias) for which Σ |y − W_o z − b|² + λ |ΔW_o|² over the text is least.

    z: what the projection reads in this layer. y: what the mixer of `activations` wrote. λ is RIDGE times the text's
    tokens times the mean of z². ΔW_o: the change, so a layer that has no error stays as it is.
    """
    mixer = build_mixer(config, context, layer)
    weight, bias = layer["mixer.out.weight"].double(), layer.get("mixer.out.bias")
    inputs = weight.shape[1] + (bias is not None)
    square, cross = weight.new_zeros(inputs, inputs), weight.new_zeros(inputs, len(weight))
    for (x, layout), y in zip(batches(activations), activations.mixer_outputs, strict=True):
        z = head_outputs(mixer, x, layout).flatten(1)
        error = y[layout.positions >= 0].double() - mixer.out(z)
        z = z if bias is None else torch.cat((z, z.new_ones(len(z), 1)), dim=1)
        square += z.T @ z
        cross += z.T @ error
    ridge = RIDGE * square.diagonal().mean()
    change = torch.linalg.solve(square + ridge * torch.eye(inputs, dtype=square.dtype, device=square.device), cross).T
    result = dict(layer)
    result["mixer.out.weight"] = weight + change[:, : weight.shape[1]]
    if bias is not None:
        result["mixer.out.bias"] = bias.double() + change[:, -1]
    return result
