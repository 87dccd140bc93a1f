"""RoPE, NoPE and ALiBi on texts eight times as long as those in training."""

from collections.abc import Sequence

from evidence.row import Finding, Numbers, Results, Row, Training, differences, stack
from heddle.data.corpus import Corpus
from heddle.model.decoder import Decoder
from heddle.training.evaluation.length_extrapolation import evaluate_extrapolation, plan_extrapolation
from heddle.training.evaluation.scores import ratio_of_sums

LENGTH, MULTIPLE = 64, 8
SETTINGS = {"steps": 600, "batch_size": 8, "sequence_length": LENGTH, "learning_rate": 3e-3}
POSITIONS = {"rope": {"kind": "rope"}, "nope": None, "alibi": {"kind": "alibi"}}
TOKENS_READ = 1_000_000  # of which the plan takes a sixth, at most 16 spans


def measure(model: Decoder, corpus: Corpus) -> Numbers:
    """The change in bits per byte from the trained length to the longest, on the same text."""
    plan = plan_extrapolation(corpus.validation, LENGTH, MULTIPLE, TOKENS_READ)
    results = evaluate_extrapolation(model, corpus.validation, plan, corpus.tokenizer.byte_lengths)
    return {"change": ratio_of_sums(results[-1].scores) - ratio_of_sums(results[0].scores)}


def findings(results: Results) -> Sequence[Finding]:
    """Changes, and changes apart."""
    alibi = [-numbers["change"] for numbers in results["alibi"].values()]
    return [
        Finding("RoPE loses beyond the trained length", [numbers["change"] for numbers in results["rope"].values()]),
        Finding("RoPE loses more than NoPE", differences(results, "rope", "nope", "change")),
        Finding("NoPE loses more than ALiBi", differences(results, "nope", "alibi", "change")),
        Finding("ALiBi loses less than 0.01", alibi, threshold=-0.01),
    ]


ROW = Row(
    title="Beyond the trained length: RoPE, NoPE, ALiBi",
    papers=[
        "Press et al. 2021 (ALiBi): trained on 1,024 tokens it reads 2,048 as well as sinusoids trained on 2,048; RoPE "
        "gets worse soon after its length.",
        "Kazemnejad et al. 2023 (NoPE): no positions generalize to longer problems better than RoPE and ALiBi.",
    ],
    trainings=[
        Training(
            name,
            stack(*[{"kind": "attention", "heads": 4, "position": position}] * 3, hidden=176),
            "stdlib",
            SETTINGS,
        )
        for name, position in POSITIONS.items()
    ],
    findings=findings,
    measure=measure,
    remark="Changes are from 64 to 512 tokens. The papers disagree about NoPE and ALiBi; the claim here is about "
    "the loss on text, as in Press et al.",
)
