"""Residual connections at 64 thin layers, started without scaling by depth."""

from collections.abc import Sequence

from evidence.row import Finding, Results, Row, Training, attention, differences

KINDS = ("pre_norm", "post_norm", "residual_dual", "sandwich")
SETTINGS = {"steps": 300, "batch_size": 8, "sequence_length": 64, "learning_rate": 3e-3}


def findings(results: Results) -> Sequence[Finding]:
    """Losses apart."""
    return [
        Finding(f"{name} ends below post-norm", differences(results, "post_norm", kind, "loss"))
        for kind, name in (("pre_norm", "Pre-norm"), ("residual_dual", "ResiDual"), ("sandwich", "Sandwich norm"))
    ] + [Finding("ResiDual ends below pre-norm", differences(results, "pre_norm", "residual_dual", "loss"))]


ROW = Row(
    title="Residual connections at 64 layers",
    papers=[
        "Xiong et al. 2020: post-norm needs warmup because its gradients are large near the output; pre-norm does not.",
        "Xie et al. 2023 (ResiDual): in deep translation models post-norm fails, and ResiDual is ahead of pre-norm.",
    ],
    trainings=[
        Training(
            kind,
            {
                "width": 32,
                "norm": {"kind": "layer"},
                "residual": {"kind": kind},
                "initialization": {"std": 32**-0.5, "depth_scaled": False},
                "layers": [
                    {
                        "repeat": 64,
                        "mixer": attention(2),
                        "feedforward": {"kind": "mlp", "hidden": 64, "activation": "relu"},
                    }
                ],
            },
            "stdlib",
            SETTINGS,
            seeds=(0, 1, 2, 3),
        )
        for kind in KINDS
    ],
    findings=findings,
)
