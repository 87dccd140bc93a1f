"""Multi-token prediction: does a loss on the token after the next help the next one?"""

from collections.abc import Sequence
from typing import Any

from evidence.row import Finding, Results, Row, Training, attention, differences, stack

MODULES: dict[str, dict[str, Any]] = {
    "none": {},
    "one": {"multi_token": {"depth": 1}},
    "two": {"multi_token": {"depth": 2}},
}
SETTINGS = {"steps": 500, "batch_size": 8, "sequence_length": 96, "learning_rate": 4e-3}


def findings(results: Results) -> Sequence[Finding]:
    """The loss of the next token, with modules and without."""
    return [
        Finding("One module lowers the loss of the next token", differences(results, "none", "one", "loss")),
        Finding("Two modules lower it further", differences(results, "one", "two", "loss")),
    ]


ROW = Row(
    title="Multi-token prediction",
    papers=[
        "DeepSeek-V3 2024: better on most benchmarks at 15.7 B and 228 B parameters.",
        "Gloeckle et al. 2024: helps from about 3 B parameters, and harms small models; nanochat saw no gain.",
    ],
    trainings=[
        Training(key, stack(*[attention()] * 3, hidden=176, **fields), "stdlib", SETTINGS)
        for key, fields in MODULES.items()
    ],
    findings=findings,
    remark="Losses are of the next token alone, in every design; coefficient 0.3. A step with modules takes longer, "
    "which is not counted.",
)
