"""Keys and values of one layer for two: what is lost, and what fewer heads lose at an equal state."""

from collections.abc import Sequence

from evidence.row import Finding, Results, Row, Training, attention, differences, stack

SETTINGS = {"steps": 400, "batch_size": 8, "sequence_length": 96, "learning_rate": 4e-3}


def paired(kv_heads: int) -> dict[str, object]:
    """Six layers, the second of each pair without keys and values of its own."""
    return stack(*[attention(8, kv_heads=kv_heads), attention(8, kv_heads=kv_heads, shared_kv=True)] * 3, hidden=176)


DESIGNS = {
    "2 heads": stack(*[attention(8, kv_heads=2)] * 6, hidden=176),
    "2 heads, shared": paired(2),
    "1 head": stack(*[attention(8, kv_heads=1)] * 6, hidden=176),
    "1 head, shared": paired(1),
}


def findings(results: Results) -> Sequence[Finding]:
    """Losses, at half the state and at an equal one."""

    def loss(worse: str, better: str) -> list[float]:
        return differences(results, worse, better, "loss")

    return [
        Finding("2 heads shared by two layers lose against 2 heads", loss("2 heads, shared", "2 heads")),
        Finding("1 head shared by two layers loses against 1 head", loss("1 head, shared", "1 head")),
        Finding("At an equal state, 1 head a layer loses against 2 shared ones", loss("1 head", "2 heads, shared")),
    ]


ROW = Row(
    title="Keys and values shared by two layers",
    papers=[
        "Brandon et al. 2024 (CLA): sharing between two layers halves the cache of MQA at almost its perplexity, and "
        "is better than smaller heads with an equal cache.",
    ],
    trainings=[Training(key, design, "stdlib", SETTINGS) for key, design in DESIGNS.items()],
    findings=findings,
    remark="Six layers with 8 query heads of 8 dims. Layers that share have fewer parameters, which are not given "
    "back.",
)
