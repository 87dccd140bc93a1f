"""Every user error gives one sentence on stderr and an exit code, and changes no existing file."""

import io
import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from heddle.cli.main import run_command
from heddle.model import load_config
from heddle.model.decoder import build
from heddle.storage.checkpoints import checkpoint_folder
from heddle.storage.model import load, save
from heddle.tokenization.tokenizer import Tokenizer
from tests import small
from tests.source import ROOT

SIZE = ["--sequence-length", "16", "--batch-size", "4", "--steps", "2", "--device", "cpu"]
CUSTOM_PART = '''"""A norm of my own."""
from torch import nn
from heddle.parts.norms import NormConfig

class MineConfig(NormConfig):
    def build(self, width):
        return nn.Identity()
'''


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of valid and invalid designs, texts and runs."""
    root = tmp_path_factory.mktemp("workspace")
    small.folder(root / "text")
    small.design_file(root / "good.yaml")
    small.design_file(root / "narrow.yaml", small.design(vocab_size=280))
    small.design_file(root / "bidirectional.yaml", bidirectional())
    (root / "broken.yaml").write_text("width: 16\nlayers: [\n")
    (root / "twice.yaml").write_text("width: 16\nwidth: 32\n")
    (root / "latin.yaml").write_bytes("width: 16 # é".encode("latin-1"))
    (root / "list.json").write_text("[1, 2]")
    (root / "empty.txt").write_text("")
    (root / "empty").mkdir()
    (root / "binary.txt").write_bytes(bytes(range(256)) * 40)
    (root / "latin.txt").write_bytes("voilà".encode("latin-1") * 100)
    (root / "short.txt").write_text("a few words only")
    (root / "mine").mkdir()
    (root / "mine" / "thesis.tex").write_text("years of work")
    (root / "file").write_text("no folder")
    (root / "tokenizer.json").write_text(Tokenizer.train([small.text(9000)], 320).to_json())
    (root / "broken.json").write_text("{}")
    (root / "rms.py").write_text(CUSTOM_PART)
    (root / "fails.py").write_text("1 / 0")
    (root / "nothing.py").write_text("value = 1")
    for name in ("run", "flipped", "cut"):
        text = ["--data", f"{root}/text", "--out", f"{root}/{name}", "--quiet"]
        assert run_command(["train", f"{root}/good.yaml", *text, *SIZE, "--save-every", "1"]) == 0
    own, tokenizer = load(root / "run")
    save(build(small.config(small.design(vocab_size=310))), root / "wider", tokenizer)
    save(build(small.config(bidirectional())), root / "encoder", tokenizer)
    save(own, root / "other", Tokenizer.train([small.text(9000)[::-1]], small.VOCABULARY))
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (root / "talk.jsonl").write_text(json.dumps({"messages": talk}) + "\n" + json.dumps({"messages": talk[:1]}) + "\n")
    (root / "rows.jsonl").write_text('{"body": "warp"}\n')
    for name in ("flipped", "cut"):
        for step in (1, 2):
            weights = checkpoint_folder(root / name, step) / "model.safetensors"
            data = bytearray(weights.read_bytes())
            data[-5] ^= 16
            weights.write_bytes(data if name == "flipped" else data[:-100])
    return root


def bidirectional() -> dict[str, object]:
    return small.design(layers=[{"mixer": {"kind": "attention", "heads": 2, "causal": False}}])


TRAIN = "train @/good.yaml --data @/text --out @/new"
MANY_WIDTHS = ",".join(str(width) for width in range(2, 132, 2))
ERRORS: list[tuple[str, int, str]] = [
    # commands and options
    ("frob", 2, ".*'frob'; see heddle --help"),
    ("train", 2, "DESIGN:.*preset:NAME.*--from FOLDER"),
    ("show", 2, "DESIGN:"),
    ("compare", 2, "DESIGN|FIELD=VALUE:"),
    ("generate", 2, "RUN:"),
    ("check", 2, "DESIGN:"),
    (f"{TRAIN} --frob", 2, ".*--frob"),
    (f"{TRAIN} --steps x", 2, "--steps x:"),
    (f"{TRAIN} --steps", 2, ".*'--steps' requires an argument; see heddle train --help"),
    (f"{TRAIN} --steps 5 --tokens 500", 2, "--steps and --tokens:"),
    (f"{TRAIN} --steps 0", 2, "steps 0:"),
    (f"{TRAIN} --tokens 3", 2, "--tokens 3:.*2048 tokens"),
    (f"{TRAIN} --tokens -3", 2, "--tokens -3:"),
    (f"{TRAIN} --batch-size 0", 2, "batch_size 0:"),
    (f"{TRAIN} --batch-size -8 --tokens 9", 2, "batch_size -8:"),
    (f"{TRAIN} --sequence-length -1", 2, "sequence_length -1:"),
    (f"{TRAIN} --gradient-accumulation-steps 3", 2, "gradient_accumulation_steps 3:.*batch_size"),
    (f"{TRAIN} --lr 0", 2, "learning_rate 0.0:"),
    (f"{TRAIN} --lr nan", 2, "learning_rate nan:"),
    (f"{TRAIN} --seed -1", 2, "seed -1:"),
    (f"{TRAIN} --save-every 0", 2, "save_every 0:"),
    (f"{TRAIN} --schedule cubic", 2, "schedule cubic:.*wsd, cosine, linear"),
    (f"{TRAIN} --optimizer sgd", 2, "optimizer sgd:.*adamw, muon"),
    (f"{TRAIN} --warmup -1", 2, "warmup -1:"),
    (f"{TRAIN} --warmup x", 2, "--warmup x:"),
    (f"{TRAIN} --steps 20 --warmup 21", 2, "--warmup 21:.*20 steps"),
    (f"{TRAIN} --lr-scale embed", 2, "--lr-scale embed:.*path=factor.*layers.*.mixer=0.5"),
    (f"{TRAIN} --lr-scale =2", 2, "--lr-scale =2:.*path=factor"),
    (f"{TRAIN} --lr-scale embed=x", 2, "--lr-scale embed=x:"),
    (f"{TRAIN} --lr-scale embed=-1", 2, "lr_scale embed=-1:"),
    (f"{TRAIN} --lr-scale layers.9.mixer=2", 2, "lr_scale layers.9.mixer=2:.*'layers.9.mixer'.*layers.0"),
    (f"{TRAIN} --lr-scale head=2", 2, "lr_scale head=2:.*'head'"),
    (f"{TRAIN} --lr-scale *=0", 2, "lr_scale:"),
    (f"{TRAIN} --transfer depth=2", 2, "--transfer depth=2:.*width=64.*--lr"),
    (f"{TRAIN} --transfer width=x", 2, "--transfer width=x:"),
    (f"{TRAIN} --transfer width=0", 2, "--transfer width=0:"),
    (f"{TRAIN} --transfer width=20", 2, "transfer_width 20: layers[0].mixer.heads.*16"),
    (f"{TRAIN} --precision fp8", 2, "precision fp8:.*fp32, bf16"),
    (f"{TRAIN} --threads 0", 2, "threads 0:"),
    (f"{TRAIN} --device cuda", 2, "device cuda:.*cpu"),
    (f"{TRAIN} --device tpu", 2, "device tpu:.*auto, cpu, cuda, cuda:N, mps"),
    (f"{TRAIN} --kernel attention", 2, "--kernel attention:.*operation=kernel.*attention=reference"),
    (f"{TRAIN} --kernel attention=flash9", 2, "kernel attention:.*'flash9'.*'flash'"),
    (f"{TRAIN} --kernel attentoin=sdpa", 2, "kernel:.*'attentoin'.*'attention'"),
    (f"{TRAIN} --part @/none.py", 2, "part @/none.py:"),
    (f"{TRAIN} --part @/fails.py", 2, "part @/fails.py:"),
    (f"{TRAIN} --part @/nothing.py", 2, "@/nothing.py:"),
    (f"{TRAIN} --part @/rms.py", 2, "part @/rms.py:.*kind 'rms'"),
    # designs
    ("show @/none.yaml", 2, "@/none.yaml:"),
    ("show gqa-tiny", 2, "gqa-tiny:.*preset:gqa-tiny"),
    ("show preset:gqa-huge", 2, "preset:gqa-huge:.*mha-tiny"),
    ("show preset:gqa-tinny", 2, "preset:gqa-tinny:.*'preset:gqa-tiny'"),
    ("show @/broken.yaml", 2, "@/broken.yaml, line 3.*YAML"),
    ("show @/twice.yaml", 2, "@/twice.yaml, line 2.*'width'.*YAML"),
    ("show @/latin.yaml", 2, "@/latin.yaml:.*UTF-8"),
    ("show @/list.json", 2, "@/list.json:"),
    ("show @/empty", 2, "@/empty:.*config.json"),
    ("show @/good.yaml widht=3", 2, ".*'widht'.*'width'"),
    ("show @/good.yaml width=0", 2, "width:.*0"),
    ("show @/good.yaml width=-4", 2, "width:.*-4"),
    ("show @/good.yaml width=wide", 2, "width:.*'wide'"),
    ("show @/good.yaml width=8.5", 2, "width:.*8.5"),
    ("show @/good.yaml layers.0.mixer.heads=3", 2, "layers[0].mixer.*: .*3"),
    ("show @/good.yaml layers.0.mixer.heads=true", 2, "layers[0].mixer.heads:.*True"),
    ("show @/good.yaml layers.0.mixer.kind=attentoin", 2, "layers[0].mixer:.*'attentoin'"),
    ("show @/good.yaml layers.7.mixer.heads=2", 2, "override 'layers.7.mixer.heads=2':"),
    ("show @/good.yaml =5", 2, "override '=5':.*path.to.field=value"),
    ("show @/good.yaml --encoder-length 5", 2, "--encoder-length 5: no layer reads"),
    ("train @/good.yaml --rank-timeout nan --data @/text --out @/new", 2, "--rank-timeout nan: must be"),
    ("train --from @/run --lora 1000000 --data @/text --out @/new", 2, "lora: rank = 1000000 is more"),
    ("show @/good.yaml --context-length 0", 2, "show: --context-length, --batch-size.*--encoder-length"),
    ("train @/bidirectional.yaml --data @/text --out @/new", 2, "causal:"),
    ("compare @/good.yaml @/bidirectional.yaml --data @/text --out @/new", 2, "@/bidirectional.yaml:"),
    # data and tokenizers
    ("train @/good.yaml --data @/none --out @/new", 2, ".*@/none"),
    ("train @/good.yaml --data @/empty --out @/new", 2, "data empty"),
    ("train @/good.yaml --data @/empty.txt --out @/new", 2, "data .*empty.txt"),
    ("train @/good.yaml --data @/binary.txt --out @/new", 2, ".*@/binary.txt"),
    ("train @/good.yaml --data @/latin.txt --out @/new", 2, ".*@/latin.txt .*UTF-8"),
    ("train @/good.yaml --data @/short.txt --out @/new", 2, "the training split.*8"),
    ("train @/good.yaml --data @/text@0 --out @/new", 2, ".*@/text@0.*above 0"),
    (f"{TRAIN} --tokenizer @/none.json", 2, ".*@/none.json"),
    (f"{TRAIN} --tokenizer @/broken.json", 2, ".*@/broken.json.*tokenizer.json"),
    ("train @/narrow.yaml --data @/text --out @/new --tokenizer @/tokenizer.json", 2,
     ".*320 tokens.*vocab_size.*280.*set vocab_size.*least 320"),
    ("train preset:gqa-tiny --vocab-size 20 --data @/text --out @/new", 2, "--vocab-size 20: "),
    (f"{TRAIN} --batch-size 99999999", 2, ".*99999999 samples"),
    ("train @/good.yaml --data hf:@/none --out @/new", 2, ".*hf:@/none"),
    ("train @/good.yaml --data hf:@/rows.jsonl --out @/new", 2, '.*@/rows.jsonl.*"text"'),
    ("train @/good.yaml --data hf:@/rows.jsonl,txt=body --out @/new", 2, "data hf:.*:.*'txt=body'"),
    ("train @/good.yaml --data hf:@/empty --out @/new", 2, ".*hf:@/empty"),
    ("train @/good.yaml --data chat:@/talk.jsonl --out @/new", 2, "--data chat:@/talk.jsonl:.*--from.*--tokenizer"),
    ("train --from @/run --data chat:@/talk.jsonl --out @/new", 2, ".*@/talk.jsonl.*line 2.*{"),
    ("train --from @/run --data chat:@/none --out @/new", 2, ".*@/none.*chat:FILE.jsonl"),
    ("train --from @/run --data chat:@/talk.jsonl --data @/text --out @/new", 2, "--data @/text:"),
    ("compare @/good.yaml --data chat:@/talk.jsonl --out @/c9", 2, ".*chat:@/talk.jsonl"),
    # training from a checkpoint
    ("train --from @/none --data @/text --out @/new", 2, "@/none.*"),
    ("train --from @/mine --data @/text --out @/new", 2, "@/mine.*"),
    ("train @/narrow.yaml --from @/run --data @/text --out @/new", 2,
     "@/narrow.yaml:.*@/run/checkpoints/step-00000002 (vocab_size.*300"),
    (f"train width=32 --from @/run --data @/text --out @/new {' '.join(SIZE)}", 2, "@/run.*model.safetensors:.*'.*"),
    ("train --from @/run --tokenizer @/tokenizer.json --data @/text --out @/new", 2,
     "--tokenizer @/tokenizer.json: --from.*--tokenizer"),
    ("train --from @/run --vocab-size 400 --data @/text --out @/new", 2, "--vocab-size 400: --from"),
    (f"train --from @/run --data @/text --out @/run {' '.join(SIZE)}", 2, "@/run:"),
    (f"{TRAIN} --lora 4", 2, "--lora 4:.*--from"),
    (f"{TRAIN} --lora-targets embed", 2, "--lora-targets embed:.*--lora"),
    (f"train --from @/run --lora 0 --data @/text --out @/new {' '.join(SIZE)}", 2, "lora: rank = 0"),
    (f"train --from @/run --lora 2 --lora-targets embed --data @/text --out @/new {' '.join(SIZE)}", 2,
     "lora:.*'embed'.*layers.*.mixer.q"),
    # folders
    ("train @/good.yaml --data @/text --out @/mine", 2, "@/mine:.*(thesis.tex)"),
    ("train @/good.yaml --data @/text --out @/file", 2, "@/file:"),
    ("train @/good.yaml --data @/text --out @/file/below", 2, "@/file/below:"),
    ("train @/good.yaml --data @/text --out /proc/heddle", 1, "/proc/heddle:"),
    ("train @/good.yaml --data @/text --out @/run", 2, "@/run:.*settings.*"),
    ("compare @/good.yaml --data @/text --out @/mine", 2, "@/mine:.*(thesis.tex)"),
    ("compare @/good.yaml --data @/text --out @/run", 2, "@/run:"),
    ("compare @/good.yaml --data @/text --out /proc/heddle", 1, "/proc/heddle:"),
    # comparisons
    ("compare width=3 --data @/text", 2, "compare:.*preset:NAME"),
    ("compare @/good.yaml --tokens 9 --seconds 3", 2, "--tokens and --seconds:"),
    ("compare @/good.yaml --seconds 0", 2, "--seconds 0:"),
    ("compare @/good.yaml --flops nan", 2, "--flops nan:"),
    ("compare @/good.yaml --seeds 0", 2, "--seeds 0:.*100"),
    ("compare @/good.yaml --speed-context-length 0", 2, "--speed-context-length:"),
    ("compare @/good.yaml --lr -1", 2, "learning_rate -1.0:"),
    ("compare @/good.yaml --optimizer adam", 2, "optimizer adam:.*adamw, muon"),
    ("compare @/good.yaml --warmup -2", 2, "warmup -2:"),
    ("compare @/good.yaml --lr-scale embed=-2", 2, "lr_scale embed=-2:"),
    ("compare @/good.yaml --transfer width=20", 2, "good: transfer_width 20.*layers[0].mixer.heads.*16"),
    ("compare @/good.yaml preset:mha-tiny --lr-scale layers.1=2", 2, "@/good.yaml: lr_scale layers.1=2.*'layers.1'"),
    ("compare @/good.yaml @/none.yaml", 2, "@/none.yaml:"),
    ("compare @/good.yaml width=0", 2, "@/good.yaml.width:"),
    ("compare @/good.yaml --vocab-size 400", 2, "vocab_size 400:.*vocab_size = 300"),
    ("compare @/good.yaml --data @/text --out @/c1 --tokens 5", 2, "tokens 5:.*1024 tokens"),
    ("compare @/good.yaml --data @/text --out @/c2 --flops 5", 2, "flops 5:.*1024 tokens"),
    ("compare @/good.yaml --data @/short.txt --out @/c3", 2, "the training split"),
    ("compare @/good.yaml --vary width", 2, "vary width:.*path.to.field=value,value"),
    ("compare @/good.yaml --vary width=", 2, "vary width=:"),
    ("compare @/good.yaml --vary width=8,,16", 2, ".*width=8,,16, line 1.*YAML"),
    ("compare @/good.yaml --vary width=8,8", 2, "vary width=8,8: 8"),
    ("compare @/good.yaml --vary width=8 --vary width=16", 2, "vary width=16:"),
    ("compare @/good.yaml --vary widht=8,16", 2, "@/good.yaml (widht=8):.*'widht'.*'width'"),
    ("compare @/good.yaml --vary residual.kind=pre_norm,none", 2, "@/good.yaml (none).residual:.*'none'"),
    ("compare @/good.yaml --vary layers.3.mixer.heads=1,2", 2, "override 'layers.3.mixer.heads=1':"),
    (f"compare @/good.yaml --vary width={MANY_WIDTHS}", 2, "vary: 65.*65 variants.*most 64"),
    ("compare @/good.yaml --vary width=8,16 --baseline width=9", 2, "baseline width=9:"),
    ("compare @/good.yaml --equal size", 2, "equal size:.*parameters, active-parameters"),
    ("compare @/good.yaml --equal flops --tokenizer @/none.json", 2, ".*@/none.json"),
    ("compare @/good.yaml --equal flops --sequence-length 0", 2, "--sequence-length 0:"),
    ("compare @/good.yaml --vary width=8,16 --equal flops", 2, "equal:"),
    ("compare @/good.yaml width=32 layers.0.mixer.heads=16 --vary layers.0.repeat=1,3 --equal parameters", 2,
     "equal parameters: repeat=3.*repeat=1.*width 32"),
    # generation
    ("generate @/none", 2, "@/none.*"),
    ("generate @/mine", 2, "@/mine.*"),
    *((f"{verb} @/encoder", 2, "@/encoder: attends to later tokens .causal: false., so it cannot generate text; read")
      for verb in ("generate", "serve", "chat")),
    ("generate @/run --max-new-tokens 0", 2, "max_new_tokens 0:"),
    ("generate @/run --temperature -1", 2, "temperature -1.0:"),
    ("generate @/run --top-k 0", 2, "top_k 0:"),
    ("generate @/run --top-p 2", 2, "top_p 2.0:"),
    ("generate @/run --seed -1", 2, "seed -1:"),
    ("generate @/run --stop=", 2, "stop:"),
    ("generate @/run --num-beams 0", 2, "num_beams 0:"),
    ("generate @/run --num-beams 2 --temperature 1", 2, "num_beams 2:"),
    ("generate @/run --num-beams 2 --draft-model @/run", 2, "num_beams 2:.*draft_model"),
    ("generate @/run --draft-model @/run --speculative-tokens 0", 2, "speculative_tokens 0:"),
    ("generate @/run --draft-model @/none", 2, "@/none.*"),
    ("generate @/run --draft-model @/wider", 2, "draft_model:.*310 tokens.*300"),
    ("generate @/run --draft-model @/other", 2, "--draft-model @/other:.*@/run"),
    ("generate @/run --weights int3", 2, "--weights int3:.*int8, int4"),
    ("generate @/run --precision half", 2, "--precision half:"),
    ("inspect @/none --text x", 2, "@/none.*"),
    ("inspect @/run --text=", 2, "--text:"),
    ("generate @/run/checkpoints/step-00000001 --threads 0", 2, "threads 0:"),
]  # fmt: skip


def command_line(arguments: str, workspace: Path) -> list[str]:
    return [word.replace("@/", f"{workspace}/") for word in arguments.split()]


@pytest.mark.parametrize(("arguments", "code", "says"), ERRORS, ids=[row[0] for row in ERRORS])
def test_errors_are_one_sentence(
    arguments: str, code: int, says: str, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(workspace)
    capsys.readouterr()
    assert run_command(command_line(arguments, workspace)) == code
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    # parentheses and brackets in the table stand for themselves
    pattern = "heddle: " + re.sub(r"[()\[\]?]", r"\\\g<0>", says.replace("@/", f"{re.escape(str(workspace))}/"))
    assert re.match(pattern, last), last
    assert "Traceback" not in err
    after = contents(workspace)
    assert all(after[name] == data for name, data in before.items())


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("frob", "see (heddle --help)"),
        ("train @/good.yaml --frob", "see (heddle train --help)"),
        ("show gqa-tiny", r"(preset:gqa-tiny)\?"),
        ("show preset:gqa-tinny", "'(preset:gqa-tiny)'"),
    ],
)
def test_the_command_that_a_sentence_prints_works(
    arguments: str, command: str, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run_command(command_line(arguments, workspace)) == 2
    printed = re.search(command, capsys.readouterr().err)
    assert printed
    words = printed[1].split()
    assert run_command(words[1:] if words[0] == "heddle" else ["show", *words]) == 0


def test_every_extra_that_a_sentence_names_can_be_installed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    named = {extra for source in sources for extra in re.findall(r"""pip_install\(["'](\w+)["']\)""", source)}
    assert len(named) > 4
    assert named <= set(extras)


def contents(workspace: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in workspace.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("train --from {root}/wider --lora 0", "lora: rank = 0"),
        ("train --from {root}/wider --lora 4 --lora-targets foo", "no projection matches 'foo'"),
        ("train --from {root}/wider --lr-scale foo=2", "no trainable parameter is at 'foo'"),
        ("train --from {root}/wider --out {root}/mine", "holds something else (thesis.tex)"),
        ("generate {run} --max-new-tokens 0", "max_new_tokens 0:"),
        ("generate {run} --temperature -1", "temperature -1.0:"),
        ("generate {run} --top-p 2", "top_p 2.0:"),
        ("generate {run} --num-beams 0", "num_beams 0:"),
        ("generate {run} --prompts {root}/empty.txt", "empty.txt: is empty"),
        ("train --from {hf} --out {root}/tuned", "hf: is a transformers folder; first `heddle import "),
        ("compare ladder {root}/good.yaml --sequence-length 0", "sequence_length 0: must be at least 1"),
        ("compare {root}/good.yaml --dry-run --out {root}/mine", "holds something else (thesis.tex)"),
        ("compare {root}/good.yaml --out {root}/mine/thesis.tex", "(it is a file)"),
        ("compare {root}/good.yaml --dry-run --out {root}/mine/thesis.tex/a", "(it lies below a file)"),
        ("compare ladder {root}/good.yaml --dry-run --out {root}/mine", "holds something else (thesis.tex)"),
        ("train {root}/good.yaml --warmup 1000 --steps 10", "--warmup 1000: is longer than the run of 10 steps"),
        ("inspect {run} --text x --out {root}/mine/thesis.tex", "thesis.tex: is a file, not a page"),
        ("inspect {run} --text x --out {run}/run.json", "run.json: is a file, not a page"),
        ("explore {root}/good.yaml --out {root}/mine/thesis.tex", "thesis.tex: is a file, not a page"),
        ("watch {run} --out {root}/mine/thesis.tex", "thesis.tex: is a file, not a page"),
        ("conformance run {root} --engine heddle --page {root}/mine/thesis.tex", "thesis.tex: is a file, not a page"),
        ("conformance run {root} --engine heddle --junit {root}/mine/thesis.tex", "thesis.tex: is a file, not a page"),
        ("conformance run {root} --engine heddle --junit {root}/a --page {root}/a", "both name"),
        ("plan {root}/good.yaml --cpu --tokens 1", "--tokens 1: must be a number of at least one step"),
        ("plan {root}/good.yaml --cpu --batch-size 0", "--batch-size 0: must be at least 1"),
        ("compare {root}/good.yaml --dry-run --data {root}/empty.txt", "data empty.txt is empty: give"),
        ("ladder {root}/good.yaml --dry-run --data {root}/empty.txt", "data empty.txt is empty: give"),
        ("compare {root}/good.yaml --dry-run --port 70000", "--port 70000: must be a port"),
        ("judge init {root}/good.yaml --out {root}/mine", "holds something else (thesis.tex)"),
        ("judge init {root}/good.yaml --out {run}", "holds a training run, not a ledger"),
        ("judge show --out {run}", "holds a training run, not a ledger"),
        ("judge submit {root}/good.yaml --out {root}/no-ledger", "holds no ledger"),
        ("compare {root}/good.yaml --vocab-size 0", "--vocab-size 0: is too small"),
        ("ladder {root}/good.yaml --vocab-size 2M", "--vocab-size 2M: is too large"),
    ],
)
def test_what_options_decide_is_refused_before_text_and_weights_are_read(
    workspace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: str,
    sentence: str,
) -> None:
    hf = tmp_path / "hf"
    if "{hf}" in options:
        assert run_command(["export", f"{workspace}/run", str(hf)]) == 0
        capsys.readouterr()
    read = ("training.run._open_data", "storage.tensor_file._BlockReader.read", "lab.compare.compare.comparison_plan")
    for path in (*read, "lab.ladder.ladder._plan_time"):
        monkeypatch.setattr(f"heddle.{path}", lambda *arguments: pytest.fail("text or weights are read"))
    words = options.format(run=f"{workspace}/run", root=workspace, hf=hf).split()
    computes = words[0] not in ("explore", "watch", "conformance", "plan")
    assert run_command([*words, *(["--device", "cpu", "--quiet"] if computes else [])]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert not (workspace / "no-ledger").exists()
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        "train {root}/good.yaml --out {root}/new/run",
        "ladder {root}/good.yaml --out {root}/new/run",
        "inspect {run} --text x --out {root}/new/page.html",
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_text_and_weights_are_read(
    words: str, workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("training.run._open_data", "storage.tensor_file._BlockReader.read"):
        monkeypatch.setattr(f"heddle.{path}", lambda *arguments: pytest.fail("text or weights are read"))
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != workspace)  # root may write anywhere
    assert run_command([*words.format(run=f"{workspace}/run", root=workspace).split(), "--device", "cpu"]) == 1
    assert "cannot be written (Permission denied)" in capsys.readouterr().err
    assert not (workspace / "new").exists()


def test_a_checkpoint_without_its_manifest_is_not_to_be_imported(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = shutil.copytree(checkpoint_folder(workspace / "run", 2), tmp_path / "step")
    (step / "manifest.json").unlink()
    assert run_command(["generate", str(step), "--device", "cpu"]) == 2
    assert f"{step}/manifest.json: is missing; restore it" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["flipped", "cut"])
def test_generating_from_a_damaged_checkpoint_names_file_and_tensor(
    name: str, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = checkpoint_folder(workspace / name, 2)
    capsys.readouterr()
    assert run_command(["generate", str(newest), "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"heddle: {newest}/model.safetensors")
    assert err.count("\n") == 1
    assert name == "cut" or "layers.0" in err
    assert run_command(["generate", str(workspace / name), "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert err.count("warning: ") == 1
    assert err.splitlines()[-1].startswith(f"heddle: {newest}/model.safetensors")


def test_resuming_from_an_earlier_checkpoint_prints_a_warning(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", f"{workspace}/good.yaml", "--data", f"{workspace}/text", "--out", str(tmp_path / "run"), *SIZE]
    assert run_command([*command, "--save-every", "1"]) == 0
    newest = checkpoint_folder(tmp_path / "run", 2) / "training.safetensors"
    newest.write_bytes(newest.read_bytes()[:-7])
    first = capsys.readouterr().out
    assert run_command([*command, "--save-every", "1"]) == 0
    out, err = capsys.readouterr()
    assert out == first
    assert f"warning: {newest}" in err
    assert "from step 1" in err


@pytest.mark.parametrize(
    ("stdin", "says"),
    [(b"\xff\xfe", "--prompt -: standard input is not UTF-8"), (b"caf\xc3", "--prompt -:")],
)
def test_a_prompt_that_is_not_text_is_refused(
    stdin: bytes, says: str, workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    capsys.readouterr()
    assert run_command(["generate", f"{workspace}/run", "--prompt", "-", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith(f"heddle: {says}")


def test_files_of_prompts_are_read_line_by_line(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts, lines = workspace / "prompts.txt", workspace / "prompts.jsonl"
    texts.write_text("the\nwarp\nand\n", encoding="utf-8")
    lines.write_text('{"prompt": "the"}\n{"prompt": "warp"}\n{"prompt": "and", "by": "\u2028"}\n', encoding="utf-8")
    command = ["generate", f"{workspace}/run", "--device", "cpu", "--max-new-tokens", "3", "--json"]
    answers = []
    for options in (["--prompts", f"{texts}"], ["--prompts", f"{lines}", "--streams", "2"]):
        capsys.readouterr()
        assert run_command([*command, *options]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert [answer["prompt"] for answer in json.loads(answers[0])] == ["the", "warp", "and"]
    for name, content, says in (
        ("empty.txt", b"", "is empty"),
        ("list.jsonl", b'{"prompt": "the"}\n[1]\n', "line 2"),
        ("bytes.txt", b"\xff\xfe", "UTF-8"),
        ("missing.txt", None, "does not exist"),
    ):
        if content is not None:
            (workspace / name).write_bytes(content)
        assert run_command([*command, "--prompts", f"{workspace / name}"]) == 2
        assert says in capsys.readouterr().err
    assert run_command([*command, "--prompts", f"{texts}", "--streams", "0"]) == 2
    assert "streams 0: must be at least 1" in capsys.readouterr().err


def test_half_a_surrogate_pair_on_the_command_line(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run_command(["generate", f"{workspace}/run", "--prompt", "a\udcff", "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert "half a surrogate pair" in err
    err.encode()


def test_names_cannot_write_to_the_terminal(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run_command(["show", f"{workspace}/\x1b[31m\nred\udc80.yaml"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "\x1b" not in err
    err.encode()


def test_one_long_line_is_text_like_any_other(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "line.txt").write_text(small.text(2_000_000).replace("\n", " "))
    assert (
        run_command(
            ["train", f"{workspace}/good.yaml", "--data", f"{tmp_path}/line.txt", "--out", f"{tmp_path}/run", *SIZE]
        )
        == 0
    )


def test_out_of_memory_is_one_sentence(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise MemoryError

    monkeypatch.setattr(load_config, "load_config", refuse)
    assert run_command(["show", "preset:gqa-tiny"]) == 1
    assert capsys.readouterr().err == "heddle: out of memory; try a smaller batch size, sequence length or design\n"


def test_a_bug_is_not_reported_as_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(load_config, "load_config", fail)
    with pytest.raises(ZeroDivisionError):
        run_command(["show", "preset:gqa-tiny"])
