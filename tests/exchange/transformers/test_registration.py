"""Our classes are found: whatever was imported before or after them, and from a folder alone."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.import_utils import direct_transformers_import

from heddle.errors import MachineError
from heddle.exchange.transformers import (
    HeddleConfig,
    HeddleForCausalLM,
    HeddleForSequenceClassification,
    HeddleForTokenClassification,
    HeddleModel,
    export,
    load,
)
from tests.exchange.transformers.designs import decoder, model, prompts
from tests.source import ROOT
from tests.storage.shared import System, standing_in

CLASSIFIERS = {
    AutoModelForSequenceClassification: HeddleForSequenceClassification,
    AutoModelForTokenClassification: HeddleForTokenClassification,
}
CODE = "modeling_heddle.py"
NAME = "dual-alibi"


@pytest.fixture
def unregistered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that export wrote, in a process where transformers has not met our classes."""
    export(decoder(NAME), tmp_path / "model")
    monkeypatch.delitem(CONFIG_MAPPING._extra_content, "heddle")
    for auto_class in (AutoModel, AutoModelForCausalLM, *CLASSIFIERS):
        monkeypatch.delitem(auto_class._model_mapping._extra_content, HeddleConfig)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(transformers.dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 0)
    return tmp_path / "model"


def test_a_folder_names_its_classes(unregistered: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        AutoModelForCausalLM.from_pretrained(unregistered)
    loaded = AutoModelForCausalLM.from_pretrained(unregistered, trust_remote_code=True)
    assert type(loaded) is HeddleForCausalLM
    assert type(AutoModel.from_pretrained(unregistered, trust_remote_code=True)) is HeddleModel
    for auto_class, kind in CLASSIFIERS.items():
        assert type(auto_class.from_pretrained(unregistered, trust_remote_code=True)) is kind
    tokens = torch.tensor(prompts([5]))
    torch.testing.assert_close(loaded(tokens).logits, model(NAME)(tokens).logits, rtol=0, atol=1e-12)
    loaded.save_pretrained(tmp_path / "again")
    assert [path.name for path in (tmp_path / "again").glob("*.py")] == [CODE], "no code of the package is copied"
    assert (tmp_path / "again" / CODE).read_text() == (unregistered / CODE).read_text()
    assert AutoConfig.from_pretrained(tmp_path / "again", trust_remote_code=True).auto_map == loaded.config.auto_map


def test_the_code_of_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    config = model(NAME).config
    config.save_pretrained(tmp_path)
    (tmp_path / CODE).write_text("as before")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with standing_in(System(3, full)) as system, pytest.raises(MachineError, match=rf"{CODE}: .*{full.strerror}"):
        config.save_pretrained(tmp_path)
    assert system.trace[2] == "write"
    assert (tmp_path / CODE).read_text() == "as before"


def test_heddle_never_runs_the_code_of_a_folder(tmp_path: Path) -> None:
    model(NAME).save_pretrained(tmp_path)
    (tmp_path / CODE).write_text("raise SystemExit('ran')")
    assert load(tmp_path)[0].config == decoder(NAME).config
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)) is HeddleForCausalLM


def test_every_module_of_transformers_knows_our_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """processing_utils replaces the module, and others keep the old one. `transformers serve` and TRL ask for names."""
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    replaced = direct_transformers_import(str(Path(transformers.__file__).parent))
    assert replaced is not transformers
    for module in (transformers, replaced):
        assert module.HeddleForCausalLM is HeddleForCausalLM
        assert module.HeddleConfig is HeddleConfig


def test_pipelines_and_lm_eval_know_that_it_writes_text() -> None:
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["heddle"] == "HeddleForCausalLM"


ORDERS = [
    "import transformers; import peft; from transformers import Trainer; import heddle.exchange.transformers",
    "import heddle.exchange.transformers; import transformers, peft; from transformers import Trainer",
    "from transformers import AutoModelForCausalLM, pipeline; import heddle; import heddle.exchange.transformers",
    "import lm_eval.models.huggingface; import peft; import heddle.exchange.transformers as late",
    "import transformers.processing_utils; import heddle.exchange.transformers; import lm_eval.models.huggingface",
]
ASK = """
import transformers
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(FOLDER)
assert type(model).__name__ == "HeddleForCausalLM"
assert transformers.HeddleForCausalLM is type(model)
"""


@pytest.mark.soak
@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_imports(order: str, tmp_path: Path) -> None:
    export(decoder(NAME), tmp_path / "model")
    program = order + ASK.replace("FOLDER", repr(str(tmp_path / "model")))
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
