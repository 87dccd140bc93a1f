"""Bits of draws, calls, trainings and texts."""
import hashlib, json, sys, tempfile
from pathlib import Path
import torch
torch.set_num_threads(1)

from tests import small
from tests.cases import CASES, case
from heddle.model.decoder import build
from heddle.laws.harness import encoder_output_for as encoder_output_of, random_tokens, layout_for
from heddle.training.loop import train
import heddle

# Module names whose draws are seeded by an earlier name: (new, old) pieces of dotted paths.
SEED_NAMES: dict[str, str] = {"final_norm": "close", "projection": "weigh"}


def seeded_by_old_names() -> None:
    from heddle.model import initialization as module

    right = module.parameter_generator

    def generator_of(seed, name):
        return right(seed, ".".join(SEED_NAMES.get(piece, piece) for piece in name.split(".")))

    module.parameter_generator = generator_of


seeded_by_old_names()


def digest(*tensors):
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return h.hexdigest()[:16]

out = {}
for name in CASES:
    config = case(name)
    model = build(config, dtype=torch.float64, seed=3)
    torch.manual_seed(0)
    tokens = random_tokens(config, 2, 9, 1)
    layout = layout_for(model, 2, 9, None)
    with torch.no_grad():
        hidden = model(tokens, layout)[0]
        logits = model.head(hidden)
    out[name] = [digest(*model.parameters()), digest(hidden, logits)]

RUNS = {
    "plain": (None, {}),
    "dropping": (small.dropping(), {"gradient_accumulation_steps": 2}),
    "moe": (small.design(layers=[{"mixer": {"kind": "attention", "heads": 2, "window": 5, "position": {"kind": "rope"}}, "feedforward": small.MOE}]), {}),
    "muon": (None, {"optimizer": "muon"}),
    "delta": (small.design(layers=[{"mixer": {"kind": "gated_delta", "heads": 2, "head_dim": 8}, "feedforward": {"kind": "mlp", "hidden": 20}}]), {"schedule": "wsd"} ),
}
tmp = Path(tempfile.mkdtemp())
texts = small.corpus(tmp / "texts")
out["corpus"] = texts.hash
for name, (data, settings) in RUNS.items():
    settings = dict(settings)
    try:
        job = small.job(texts, tmp / name, data, steps=6, **settings)
    except Exception as e:
        settings.pop("schedule", None)
        job = small.job(texts, tmp / name, data, steps=6, **settings)
    outcome = train(job)
    written = heddle.generate(outcome.model, [[5, 9, 2], [7]], max_new_tokens=9, temperature=0.8, top_k=50, seed=4)
    out["run-" + name] = [digest(*outcome.model.parameters()), json.dumps(outcome.scores), written]
Path(sys.argv[1]).write_text(json.dumps(out, indent=1, default=str))
print(len(out))
