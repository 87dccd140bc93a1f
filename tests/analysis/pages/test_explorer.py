"""The explorer: its formulas give the sizes of built models, and its page holds all it shows."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import heddle
from heddle.cli.main import run_command
from heddle.config import DesignError
from heddle.errors import ConfigError
from heddle.lab.explore import page as explorer
from heddle.lab.explore.choices import SLOTS, explorer_design, kinds_of, mistakes, published_designs
from heddle.lab.explore.costs import Costs, cost_functions
from heddle.lab.explore.formulas import formulas_of, values_of
from heddle.lab.explore.page import explorer_page
from heddle.model.size import size
from tests.analysis.explorer.random_choices import TEXT, random_designs
from tests.analysis.explorer.sizes import costs_of, declared_size, refused_fields, unchecked
from tests.cases import CASES
from tests.html_page import Page
from tests.source import ROOT


@pytest.mark.parametrize("choices", [40, pytest.param(110, marks=pytest.mark.nightly)])
def test_formulas_give_the_sizes_of_built_models(choices: int) -> None:
    kinds = {(slot, kind.kind) for slot in ("mixers", "feedforwards", "residuals") for kind in kinds_of(slot)}
    checked: set[tuple[str, str]] = set()
    for number, design in enumerate(random_designs(50 * choices, seed=17)):
        if number >= choices and kinds <= checked:
            break
        try:
            config = heddle.load_config(design)
            built = size(config, context_length=TEXT)
        except ConfigError:
            continue
        declared = declared_size(config, TEXT)
        assert declared is not None
        assert declared.parameters == built.parameters, design
        assert declared.active_parameters == built.active_parameters, design
        assert declared.flops == round(built.flops_per_token * TEXT), design
        assert declared.state_bytes == built.state_bytes - built.position_table_bytes, design
        layer = config.layers[0]
        for part in (layer.mixer, layer.feedforward, config.residual):
            assert part is not None
            assert refused_fields(part, config.width, layers=config.depth) == []
            checked.add((part.slot, part.kind))
    assert kinds <= checked


@pytest.mark.parametrize("fields", [{}, {"block_size": 1}, {"block_size": 3}, {"block_size": 11}], ids=str)
def test_formulas_of_a_stream_that_grows(fields: dict[str, int]) -> None:
    """Layer by layer, and for several equal layers in a row, as the page has them."""
    mixer, feedforward = {"kind": "attention", "heads": 2}, {"kind": "mlp", "hidden": 24}
    parts = [{"mixer": mixer, "feedforward": feedforward}, {"mixer": mixer}, {"feedforward": feedforward}]
    layers = [{"repeat": count, **each} for count, each in zip((4, 5, 2), parts, strict=True)]
    residual = {"kind": "attention_residuals", **fields}
    config = heddle.load_config({"vocab_size": 50, "width": 24, "layers": layers, "residual": residual})
    built, declared = size(config, TEXT), declared_size(config, TEXT)
    assert declared is not None
    assert (declared.parameters, declared.flops) == (built.parameters, round(built.flops_per_token * TEXT))
    formulas: Any = formulas_of("residuals", "attention_residuals")
    around = values_of(config.residual) | {"width": 24, "tokens": TEXT, "branches": 2}
    around |= {"norm_weights": 1, "norm_scalars": 0}
    rows = [(count, before) for before in range(5) for count in range(1, 8)]
    for count, before in rows:
        at = [
            around | {"count": 1, "layers_before": i, "branches_before": 2 * i} for i in range(before, before + count)
        ]
        mean = costs_of(formulas, around | {"count": count, "layers_before": before, "branches_before": 2 * before})
        assert abs(sum(costs_of(formulas, each)[2] for each in at) - count * mean[2]) <= count / 2


def test_a_kind_without_costs_is_not_shown_and_its_designs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else names the kinds that the page leaves out."""
    config = heddle.load_config(CASES["rg-lru"])
    assert explorer_design(config)["layers"][0]["mixer"]["kind"] == "rg_lru"
    for slot, kind, path in (("mixers", "rg_lru", "layers[0].mixer.kind"), ("norms", "layer", "norm.kind")):
        with monkeypatch.context() as patch:
            patch.delitem(cost_functions, (slot, kind))
            kinds_of.cache_clear()
            assert kind not in {each.kind for each in kinds_of(slot)}
            with pytest.raises(DesignError) as caught:
                explorer_design(config)
            assert caught.value.path == path
    kinds_of.cache_clear()


def test_what_cannot_be_built_is_refused() -> None:
    config = heddle.load_config("preset:gqa-tiny")
    mixer: Any = config.layers[0].mixer
    refused = refused_fields(mixer, 7)
    assert ("heads", f"{mixer.heads} does not divide width = 7; give head_dim, or other heads") in refused


def refusal(design: dict[str, Any]) -> DesignError | None:
    """What load_config says of a design."""
    try:
        heddle.load_config(design)
    except DesignError as error:
        return error
    return None


@pytest.mark.parametrize("choices", [600, pytest.param(2_000, marks=pytest.mark.nightly)])
def test_the_page_refuses_what_the_config_refuses(choices: int) -> None:
    """The same field and the same sentence, and nothing else: random designs, of which some cannot be built."""
    refused = set[tuple[str, str, str]]()
    for design in random_designs(choices, seed=8):
        layer, width = design["layers"][0], design["width"]
        layer.pop("shared", None)  # what two visits of a layer cannot share no part declares
        found = []
        for name, slot in (("mixer", "mixers"), ("feedforward", "feedforwards")):
            fields = refused_fields(unchecked(slot, layer[name]), width)
            found += [(f"layers[0].{name}.{path}", text) for path, text in fields]
        block = unchecked("residuals", design["residual"])
        found += [(f"residual.{path}", text) for path, text in refused_fields(block, width, layers=layer["repeat"])]
        found += [(f"norm.{path}", text) for path, text in refused_fields(unchecked("norms", design["norm"]), width)]
        error = refusal(design)
        expected = None if error is None else (error.path, error.reason.replace(".0 ", " "))
        assert expected in found if error is not None else not found, (design, expected, found)
        if error is not None:
            slot, *inner = error.path.removeprefix("layers[0].").split(".")
            refused.add((slot, (design | layer)[slot]["kind"], ".".join(inner)))
    assert len(refused) > 40


def test_a_sentence_that_the_config_does_not_say_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A condition whose witness is allowed is an error of the explorer."""

    def costs(n: Any) -> Costs:
        n.refuse(n.heads, heads=8)
        return Costs()

    monkeypatch.setitem(cost_functions, ("mixers", "attention"), costs)
    formulas_of.cache_clear()
    with pytest.raises(ValueError, match="is not rejected"):
        formulas_of("mixers", "attention")
    formulas_of.cache_clear()


def test_published_designs_are_whole() -> None:
    designs = {each["name"]: each["design"] for each in published_designs()}
    assert {"DeepSeek-V3", "Meta-Llama-3-8B", "gpt2", "OLMo-2-1124-7B-Instruct"} <= designs.keys()
    for name in ("DeepSeek-V3", "Qwen3-Next-80B-A3B-Thinking"):
        data = designs[name]
        layers = [{**layer, "repeat": layer["count"]} for layer in data["layers"]]
        for layer in layers:
            del layer["count"]
        config = heddle.load_config({**data, "layers": layers})
        assert explorer_design(config) == data
        declared, built = declared_size(config, 512), size(config, 512)
        assert declared is not None
        assert (declared.parameters, declared.active_parameters) == (built.parameters, built.active_parameters)


def test_mistakes_are_those_of_the_documentation() -> None:
    page = (ROOT / "docs/commonly-wrong.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^### (.+?)\n(.+?)(?=^##|\Z)", page, re.M | re.S))
    assert sections.keys() == {mistake["title"] for mistake in mistakes()}
    for mistake in mistakes():
        assert mistake["law"] in sections[mistake["title"]].partition("Caught by")[2], mistake["title"]
        assert set(mistake["kinds"]) <= {kind.kind for kind in kinds_of(mistake["slot"])}


@pytest.mark.parametrize("slot", [None, "residuals"])
def test_the_page_is_one_file(slot: str | None) -> None:
    text = explorer_page(slot)
    page = Page(text)
    assert page.loads == []
    assert not re.search(r"https?://(?!www\.w3\.org)|url\(|@import|fetch\(", text)
    assert len(page.ids) == len(set(page.ids))
    data = json.loads(page.scripts[0])
    assert data["pages"] == (list(SLOTS) if slot is None else [slot])
    for shown in data["pages"]:
        assert all(data["about"][shown][kind["kind"]] for kind in data["slots"][shown])
    assert text == explorer_page(slot)


def test_formulas_are_typeset() -> None:
    page = explorer.docstring_html("A part.\n\n    y_t = S_t q_t\n\nWith `heads`.")
    assert page.startswith('<p>A part.</p><div class="formula"><div><math')
    assert page.endswith("<p>With <code>heads</code>.</p>")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.html"
    assert run_command(["explore", "preset:mla-tiny", "layers.0.repeat=3", "--out", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}\n"
    text = file.read_text(encoding="utf-8")
    assert '"count":3' in text
    assert run_command(["explore", "--slot", "heads"]) == 2
    assert capsys.readouterr().err.startswith("heddle: --slot: 'heads' has no page; choose one of mixers, ")
