"""Every kind of page in a real browser. `make test-browser` runs this; `make test` needs no browser."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from playwright.sync_api import Browser, Page

import heddle
from heddle.cli.main import run_command
from heddle.config import kind_class, kinds, parse_config
from heddle.errors import ConfigError
from heddle.lab.conformance.run import NOT_SEEN, PROPERTIES, RIGHT, WRONG, Finding, conformance_page
from heddle.lab.explore.choices import SLOTS, published_designs
from heddle.lab.explore.page import explorer_page
from heddle.lab.inspect import InspectedModel, inspect_layers, inspect_page
from heddle.lab.pages.conversion import conversion_page
from heddle.lab.pages.judge import judge_page
from heddle.lab.pages.runs import runs_page
from heddle.lab.runs import RunSummary
from heddle.laws.harness import model_under_test
from heddle.model.config import ModelConfig
from heddle.model.size import size
from heddle.numerics.attention.mask import AttentionMask
from heddle.numerics.rotary import inverse_frequencies, sinusoidal_embedding
from heddle.parts.positions.alibi import AlibiConfig
from heddle.parts.positions.relative_bias import buckets_by_offset
from tests import cases
from tests.analysis.comparison.plain import report_page
from tests.analysis.comparison.reports import make_report
from tests.analysis.conversion.conversions import single, sweep
from tests.analysis.explorer.random_choices import TEXT, random_designs
from tests.analysis.ladder.test_ladder import command, folder, workers
from tests.analysis.pages.test_policy import JUDGED
from tests.browser.browser import LOCAL, PHONE, chromium, errors, open_page
from tests.browser.hostile_addresses import MARK, PLACES, VALUES, addresses, at
from tests.source import ROOT

__all__ = ["chromium", "folder", "workers"]  # fixtures
CHOICES = 400
# What markup of others would do if a page let it in: the policy stops each of these.
INJECT = """(() => {
  const script = document.createElement("script"), button = document.createElement("button");
  script.textContent = "window.ran = 'script'";
  button.setAttribute("onclick", "window.ran = 'handler'");
  document.body.append(script, button);
  button.click();
  location.href = "javascript:void(window.ran = 'address')";
  return new Promise(done => setTimeout(() => done(window.ran)));
})()"""

# Words of a picture that leave it, lie on other words, or lie on a point; and legends that scroll.
HIDDEN_WORDS = """() => [...document.querySelectorAll("div.plot, svg:not(div.plot svg)")].flatMap((picture) => {
  const whole = picture.getBoundingClientRect(), box = (element) => element.getBoundingClientRect();
  if (!whole.width) return [];
  const over = (one, other) => Math.min(one.right, other.right) - Math.max(one.left, other.left) > 2
    && Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 3;
  const shown = [...picture.querySelectorAll("text")].filter((text) => text.textContent.trim() && box(text).width);
  const words = shown.map((text) => [text.textContent, box(text)]);
  const points = [...picture.querySelectorAll(".points .point")].map(box);
  const notes = [...picture.querySelectorAll(".annotation-text")].map((text) => [text.textContent, box(text)]);
  return [
    ...words.filter(([, at]) => at.left < whole.left - 2 || at.right > whole.right + 2 || at.top < whole.top - 2
      || at.bottom > whole.bottom + 2).map(([word]) => `leaves its picture: ${word}`),
    ...words.flatMap(([word, at], index) => words.slice(index + 1).filter(([, other]) => over(at, other))
      .map(([other]) => `lie on each other: ${word}, ${other}`)),
    ...notes.filter(([, at]) => points.some((point) => over(at, point))).map(([word]) => `covers a point: ${word}`),
    ...[...picture.querySelectorAll(".legend .scrollbar")].filter((bar) => box(bar).height).map(() => "legend scrolls"),
  ];
}).concat([...document.querySelectorAll("body *:not(svg *)")].filter((element) => !element.children.length
  && element.clientWidth > 2 && element.scrollWidth > element.clientWidth + 1
  && getComputedStyle(element).overflowX === "visible").map((element) => `leaves its box: ${element.textContent}`),
  [...document.querySelectorAll("td")].filter((cell) => cell.textContent.length > 60 && cell.clientWidth > 0
  && cell.clientHeight > 2 * cell.clientWidth).map((cell) => `is squeezed: ${cell.textContent}`),
  [...document.querySelectorAll(".grid > * + *")].filter((card) => {
    const [before, own] = [card.previousElementSibling, card].map((each) => each.getBoundingClientRect());
    return own.top < before.bottom && Math.abs(own.top - before.top) > 1;
  }).map((card) => `is lower than the card beside it: ${card.textContent.slice(0, 80)}`))"""

# A figure is higher by its legend once it is drawn.
DRAWN = """() => [...document.querySelectorAll("div.plot")].filter(plot => plot.querySelector(".legend"))
  .every(plot => plot.style.height && plot.querySelector(".main-svg").clientHeight === plot.clientHeight)"""

# What users ask the search of the documentation, and what one of its first three answers leads to.
QUESTIONS = {
    "how do I convert to GQA?": "docs/convert",
    "kv_heads": "docs/parts/mixers",
    "--budget": "docs/options",
    "resume a training": "docs/training/resume",
    "learning rate": "docs/training/learning-rates",
    "how many seeds": "docs/compare/seeds",
    "export to llama.cpp": "docs/deploy/llama-cpp",
    "rope scaling": "docs/parts/positions",
    "decode speed": "docs/compare/reading",
    "fine-tuning": "docs/training/finetune",
    "out of memory": "docs/plan.html",
    "speculative decoding": "docs/generation",
    "sliding window attention": "docs/parts/mixers",
    "perplexity": "docs/training/files",
    "openai api": "docs/serve",
    "kv cache size": "docs/plan.html|docs/start/size.html",
    "learning rate tuning": "docs/compare/tuning",
    "learning rate warmup": "docs/training/settings",
    "compare two models on my data": "docs/compare.html",
    "sliding window": "docs/parts/mixers|docs/convert",
    "export gguf": "docs/deploy/llama-cpp|docs/huggingface/quantized",
    "multi gpu": "docs/ranks.html",
    "checkpoint format": "docs/training/files",
    "GQA to MLA": "docs/convert.html",
    "log probabilities": "docs/serve/requests",
    "tokenizer": "docs/training/data",
    "tune": "docs/compare/tuning",
    "resume training": "docs/training/resume",
    "MLA rank": "docs/parts/mixers|docs/convert|docs/start/size",
    "muon": "docs/training/settings|docs/training/learning-rates",
    "router aux loss": "docs/experts|docs/parts/feedforwards",
    "add position encoding": "docs/add-a-part|docs/parts/positions",
    "OOM": "docs/plan.html",
    "halve the cache": "docs/convert.html|docs/start/size.html",
    "ran out of memory": "docs/plan.html",
    "window": "docs/parts/mixers",
    "logprobs": "docs/serve/requests",
    "MLA": "docs/parts/mixers",
    "kv cache size per token": "docs/start/size",
    "value embeddings": "docs/parts/mixers",
    "deepseek v3": "docs/huggingface/families",
    "which models can I load": "docs/huggingface/families",
    "top_k sampling": "docs/generation",
    "int8 quantization": "docs/huggingface/quantized",
    "bfloat16 training": "docs/training/precision",
    "gradient checkpointing": "docs/training/settings",
    "train on my own text": "docs/training/data",
    "scaling law": "docs/ladder",
    "needle in a haystack": "docs/training/tasks",
    "custom mixer": "docs/add-a-part",
    "streaming": "docs/serve",
    "how long will it take": "docs/plan",
    "how long does training 10 billion tokens take": "docs/plan",
    "KV cache bytes at 8k context": "docs/start/size",
    "best learning rate for 50M parameters": "docs/compare/tuning",
    "MLA with mixture of experts and shared experts": "docs/parts/feedforwards",
    "reduce the KV cache of a trained model": "docs/convert.html",
    "how do I measure the loss of a model on my text": "docs/compare.html",
    "secure the server TLS token reverse proxy": "docs/serve.html",
    "function calling tools": "docs/serve/requests",
    "prompt longer than the context": "docs/serve/limits",
    "this model has no chat template": "docs/serve.html",
    "stream cancel client disconnect": "docs/serve/limits",
}
# Of the first five answers: where each leads, and its excerpt, if it is no name.
ANSWERS = """() => [...document.querySelectorAll("#search-results li")].slice(0, 5).map((item) =>
  [item.querySelector("a").getAttribute("href"), item.querySelector(":scope > span, :scope > p")?.textContent ?? ""])"""


@pytest.fixture(scope="module")
def explorers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The explorer's page of each slot, and of a whole design under the name `design`."""
    folder, pages = tmp_path_factory.mktemp("explorer"), {}
    for slot in (*SLOTS, "design"):
        pages[slot] = folder / f"{slot}.html"
        pages[slot].write_text(explorer_page(None if slot == "design" else slot), encoding="utf-8")
    return pages


def check_page(chromium: Browser, address: Path | str) -> None:
    """No script of others, error, or request but for itself; no horizontal scroll on a phone; dark; keyboard; words."""
    page = open_page(chromium, address)
    assert page.evaluate(INJECT) is None, f"{address} runs scripts that its policy does not name"
    for width, dark in ((1280, False), (PHONE, True)):
        page = open_page(chromium, address, width=width, dark=dark)
        assert errors(page) == []
        assert [each.url for each in page.requests() if not each.url.startswith((*LOCAL, str(address)))] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{address} scrolls at {width} px"
        background = page.evaluate("getComputedStyle(document.body).backgroundColor").removeprefix("rgb(").split(",")
        assert (int(background[0]) < 90) == dark
        for fold in ("", "opened"):
            if fold:
                page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
            page.wait_for_function(DRAWN)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{address} {fold} scrolls"
            assert page.evaluate(HIDDEN_WORDS) == [], f"{address} {fold} at {width} px"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement !== document.body || !document.querySelector('a, button, input')")


def test_reports(chromium: Browser, tmp_path: Path) -> None:
    model = model_under_test(
        parse_config(ModelConfig, cases.design(cases.layer(cases.attention(heads=4, kv_heads=2, window=3))))
    )
    deep = model_under_test(parse_config(ModelConfig, cases.design(*[cases.layer(cases.attention(heads=4))] * 24)))
    inspected = InspectedModel("loom", 12345, ["start", " a", "b", "<c>"])
    runs = [
        RunSummary(name, 2, 4, 200, "bits_per_byte", 2.0, 2.5, 100.0, 1e9, {}, [(100, 3.0), (200, 2.0)])
        for name in ("one", "two")
    ]
    pages = {
        "comparison": report_page(make_report()),
        "conversion": conversion_page(single()),
        "sweep": conversion_page(sweep()),
        "inspection": inspect_page(inspected, inspect_layers(model, [3, 1, 4, 1])),
        "runs": runs_page(runs, ["", "width 32"]),
        "judge": judge_page(judged()),
        "deep": inspect_page(inspected, inspect_layers(deep, [3, 1, 4, 1])),
        "conformance": conformance_page("engine", "fp32", findings()),
        "no mistake": conformance_page("engine", "fp32", [each for each in findings() if each.status != WRONG]),
    }
    for name, text in pages.items():
        file = tmp_path / f"{name}.html"
        file.write_text(text, encoding="utf-8")
        check_page(chromium, file)
    for name, screens in {"sweep": 6, "conversion": 4, "deep": 3}.items():  # at first, what is long is folded
        page = open_page(chromium, tmp_path / f"{name}.html", width=PHONE)
        page.locator(".needs-script").first.wait_for()  # it is drawn
        assert page.evaluate("document.documentElement.scrollHeight") < screens * 900, name
    page = open_page(chromium, tmp_path / "deep.html", width=PHONE)
    drawn = (
        "[...document.querySelectorAll('.map canvas')].filter(each => each.checkVisibility() && each.width > 3).length"
    )
    page.wait_for_function(f"() => {drawn} === 6 * 4")
    page.locator(".maps summary").last.click()
    page.wait_for_function(f"() => {drawn} === 12 * 4")
    page = open_page(chromium, tmp_path / "deep.html")
    page.wait_for_function(f"() => {drawn} === 24 * 4")
    assert page.locator("tbody tr").last.inner_text().split("\n")[1].startswith("as layer 0")


def findings() -> list[Finding]:
    """Of four models what a kit finds, with a long reason that no line holds."""
    words = {RIGHT: "", WRONG: "it raised an error", NOT_SEEN: f"{'its.module.function' * 4} does not support it"}
    return [
        Finding(f"family{number}", "with-a-long-name-of-its-own", name, "whole", status, 0.1, 1e-5, reason=reason)
        for number in range(4)
        for name, (status, reason) in zip(PROPERTIES, list(words.items()) * len(PROPERTIES), strict=False)
    ]


def judged() -> dict[str, Any]:
    """What `heddle judge show` returns, of a stream in which many proposals are as good as the incumbent."""
    one, _ = JUDGED["proposals"]
    verdicts = [("better", 0.1), ("worse", -0.1), ("no clear difference", -0.01)]
    proposals = [
        one | {"number": number, "name": f"number {number}", "incumbent": number == 1}
        | ({} if number == 1 else {"verdict": verdict, "improvement": {"mean": mean, "low": None, "high": None}})
        for number, (verdict, mean) in enumerate(verdicts * 4, 1)
    ]  # fmt: skip
    return JUDGED | {"proposals": proposals}


@pytest.mark.usefixtures("workers")
def test_ladder(chromium: Browser, folder: Path, tmp_path: Path) -> None:
    assert run_command(command(folder, tmp_path, "--target", "200k")) == 0
    check_page(chromium, tmp_path / "ladder.html")


def test_site(chromium: Browser, tmp_path: Path) -> None:
    out = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "tools.site", str(out)], cwd=ROOT, check=True)
    for name in (
        "index",
        "docs/parts/mixers",
        "docs/conformance",
        "api/heddle.model.size",
        "explorer/index",
        "docs/start/student",
    ):
        check_page(chromium, out / f"{name}.html")
    search = (out / "search.html").as_uri()
    check_page(chromium, f"{search}?q=retention")
    for asked, answer in QUESTIONS.items():
        page = open_page(chromium, f"{search}?q={quote(asked)}")
        page.wait_for_function("() => document.querySelector('.search-summary')?.textContent")
        hits = page.evaluate(ANSWERS)
        links = [link for link, _ in hits]
        assert re.search(answer, " ".join(links[:3])), (asked, links)
        assert not [link for link in links if ".zh." in link], (asked, links)
        assert not [link for link, excerpt in hits if not excerpt], (asked, links)
        assert errors(page) == [], asked


@pytest.mark.parametrize("slot", [*SLOTS, "design"])
def test_explorer_pages(chromium: Browser, explorers: dict[str, Path], slot: str) -> None:
    check_page(chromium, explorers[slot])


def in_page(design: dict[str, Any]) -> dict[str, Any]:
    """A design as the page holds it."""
    layers = [{**layer, "count": layer.get("repeat", 1)} for layer in design["layers"]]
    return {**design, "layers": layers, "tokens": TEXT, "bytes": 4}


def test_random_choices_have_the_sizes_of_built_models(chromium: Browser, explorers: dict[str, Path]) -> None:
    page = open_page(chromium, explorers["design"])
    designs = list(random_designs(CHOICES + 200, seed=2))
    sizes = "designs => designs.map(design => refusals(design).length ? null : summary(design))"
    answers = page.evaluate(sizes, [in_page(design) for design in designs])
    built = 0
    for design, answer in zip(designs, answers, strict=True):
        assert answer == measured(design), design
        built += answer is not None
    assert built >= CHOICES // 2


def measured(design: dict[str, Any]) -> dict[str, int] | None:
    """The numbers of the built model; None for a design that heddle refuses."""
    try:
        built = size(heddle.load_config(design), context_length=TEXT)
    except ConfigError:
        return None
    return {
        "parameters": built.parameters,
        "active": built.active_parameters,
        "flops": round(built.flops_per_token * TEXT),
        "state": built.state_bytes - built.position_table_bytes,
    }


def test_a_choice_changes_what_it_must(chromium: Browser, explorers: dict[str, Path]) -> None:
    page = open_page(chromium, explorers["mixers"])
    before = page.evaluate("[$('numbers').textContent, $('yaml').textContent, $('pictures').innerHTML, location.hash]")
    page.evaluate("$('kind-latent_attention').focus()")
    page.keyboard.press("Enter")
    after = page.evaluate("[$('numbers').textContent, $('yaml').textContent, $('pictures').innerHTML, location.hash]")
    assert page.evaluate("$('kind-name').textContent") == "latent_attention"
    assert page.evaluate("document.activeElement.id") == "kind-latent_attention"
    assert all(first != second for first, second in zip(before, after, strict=True))
    page = open_page(chromium, explorers["mixers"], after[3])
    assert page.evaluate("$('yaml').textContent") == after[1]
    page.fill("[id='field.kv_rank']", "999")
    assert "999 is larger than width = 512" in page.evaluate("$('refusals').textContent")
    assert errors(page) == []


def test_every_formula_is_whole_on_a_phone(chromium: Browser, explorers: dict[str, Path]) -> None:
    page = open_page(chromium, explorers["design"], width=PHONE)
    cut = page.evaluate("""Object.values(DATA.about).flatMap(kinds => Object.entries(kinds).filter(([, about]) => {
      $("about").innerHTML = about;
      fitFormulas();
      return [...document.querySelectorAll("#about .formula")].some(each => each.scrollWidth > each.clientWidth + 1);
    }).map(([kind]) => kind))""")
    assert cut == []
    assert errors(page) == []


def test_published_models_stand_with_their_family(chromium: Browser, explorers: dict[str, Path]) -> None:
    page = open_page(chromium, explorers["design"])
    shown = """[...document.querySelectorAll("#design-model optgroup")].map(group =>
      [group.label, [...group.children].map(each => each.textContent)])"""
    families: dict[str, list[str]] = {}
    for model in published_designs():
        families.setdefault(model["family"], []).append(model["name"])
    assert {family: sorted(names) for family, names in page.evaluate(shown)} == {
        family: sorted(names) for family, names in families.items()
    }


def test_every_published_model_opens_after_any_layer_of_another(chromium: Browser, explorers: dict[str, Path]) -> None:
    page = open_page(chromium, explorers["design"])
    choose = """const list = document.getElementById("design-model");
      list.value = String(index);
      list.dispatchEvent(new Event("input", {bubbles: true}));
      return [DATA.models[index].name, refusals(state.design).length, state.design.layers.length];"""
    walk = """state.layer = layer;
      const drawn = DATA.pages.map(slot => { state.slot = slot; render(); return $("pictures").innerHTML; });
      return drawn.join().includes("NaN");"""
    count = page.evaluate("history.replaceState = () => {}; state.design.tokens = 4096; DATA.models.length")
    opened = []
    for index in range(count):
        name, refused, layers = page.evaluate(f"(index => {{ {choose} }})({index})")
        broken = [page.evaluate(f"(layer => {{ {walk} }})({layer})") for layer in range(layers)]
        opened.append((name, any(broken), refused))
    assert len(opened) == len(published_designs())
    assert [name for name, is_broken, refused in opened if is_broken or refused] == []
    assert errors(page) == []


# The page lives: it shows a known kind, and numbers or the reason why there are none. Nothing of others stands in it.
LIVES = f"""(() => {{
  const kinds = ["none", ...DATA.slots[state.slot].map(kind => kind.kind)];
  const shown = $("numbers").textContent + $("refusals").textContent;
  return !window.{MARK} && kinds.includes($("kind-name").textContent) && shown.length > 20
    && !document.querySelector(".wrap").innerHTML.includes("{MARK}") && !document.querySelector("img, iframe, object");
}})()"""


def test_a_hostile_address_runs_nothing(chromium: Browser, explorers: dict[str, Path]) -> None:
    for name, address in addresses():
        page = open_page(chromium, explorers["design"], f"#{address}")
        assert page.evaluate(LIVES), name
        page.evaluate("document.getElementById('again').click()")
        assert page.evaluate("$('kind-name').textContent === chosen().kind && !$('refusals').textContent"), name
        assert errors(page) == [], name


def test_a_damaged_address_opens_the_first_choice(chromium: Browser, explorers: dict[str, Path]) -> None:
    page = open_page(chromium, explorers["design"])
    first = page.evaluate("$('yaml').textContent")
    for address in ("#%7B", "#not%20data", "#%7B%22design%22%3A%7B%22layers%22%3A%5B%5D%7D%7D"):
        page = open_page(chromium, explorers["design"], address)
        assert page.evaluate("$('yaml').textContent") == first
        assert errors(page) == []


@pytest.mark.parametrize("explorer", ["design", "scalings"])
def test_a_wrong_value_is_ignored_in_every_place(chromium: Browser, explorers: dict[str, Path], explorer: str) -> None:
    """What remains is a right choice: it opens as itself, and holds nothing of the value."""
    check = f"""text => {{
      state = stateFrom(encodeURIComponent(text));
      render();
      const left = JSON.stringify(state);
      return [left, {LIVES}, JSON.stringify(stateFrom(encodeURIComponent(left))) === left];
    }}"""
    page = open_page(chromium, explorers[explorer])
    page.evaluate("history.replaceState = () => {}; 0")
    for place in PLACES:
        texts = [at(place, value) for value in VALUES.values()]
        for (name, value), (left, lives, is_right) in zip(
            VALUES.items(), page.evaluate(f"texts => texts.map({check})", texts), strict=True
        ):
            assert lives, (place, name)
            assert is_right, (place, name)
            assert not holds(json.loads(left), value), (place, name)
    assert errors(page) == []


def holds(data: Any, value: Any) -> bool:
    """Whether a value stands anywhere in data."""
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return (type(data) is type(value) and data == value) or any(holds(each, value) for each in inner)


def test_the_address_of_a_right_choice_opens_it(chromium: Browser, explorers: dict[str, Path]) -> None:
    page = open_page(chromium, explorers["design"])
    opens = """(design => { state = {slot: "mixers", layer: 0, design, pinned: design}; const before = copy(state);
      const after = stateFrom(encodeURIComponent(JSON.stringify(state)));
      const same = each => yaml(designData(each.design)) + yaml(designData(each.pinned)) + each.slot + each.layer;
      return same(before) === same(after) && before.design.tokens === after.design.tokens; })"""
    models = page.evaluate(f"DATA.models.map(model => ({{tokens: 512, bytes: 4, ...model.design}})).map({opens})")
    assert models == [True] * len(published_designs())
    designs = [in_page(design) for design in random_designs(CHOICES, seed=5)]
    assert page.evaluate(f"designs => designs.map({opens})", designs) == [True] * CHOICES
    index = page.evaluate("DATA.models.findIndex(model => model.design.layers.length === 3)")
    shown = "[$('yaml').textContent, $('numbers').textContent, $('kind-name').textContent, $('curves').innerHTML]"
    choice = "state.slot = 'feedforwards'; state.layer = 2; state.pinned = copy(DATA.models[0].design)"
    page.evaluate(f"setModel({index}); {choice}; state.pinned.tokens = 512; state.pinned.bytes = 2; render()")
    before, address = page.evaluate(shown), page.evaluate("location.hash")
    page = open_page(chromium, explorers["design"], address)
    assert page.evaluate(shown) == before
    assert page.evaluate("state.layer") == 2
    assert errors(page) == []


def test_the_yaml_builds_the_shown_design(chromium: Browser, explorers: dict[str, Path], tmp_path: Path) -> None:
    page = open_page(chromium, explorers["design"])
    for design in [each for each in random_designs(40, seed=2) if builds(each)][:6]:
        page.evaluate("design => { state.design = design; state.layer = 0; render(); }", in_page(design))
        file = tmp_path / "design.yaml"
        file.write_text(page.evaluate("$('yaml').textContent"), encoding="utf-8")
        assert heddle.load_config(str(file)).resolved() == heddle.load_config(design).resolved()


def builds(design: dict[str, Any]) -> bool:
    """Whether heddle accepts a design."""
    try:
        heddle.build(heddle.load_config(design), device="meta")
    except ConfigError:
        return False
    return True


def test_pictures_are_drawn_from_the_numbers_of_heddle(chromium: Browser, explorers: dict[str, Path]) -> None:
    page = open_page(chromium, explorers["design"])
    tokens = torch.arange(16)[None]
    for causal, window in ((True, None), (True, 1), (True, 5), (False, None), (False, 3)):
        mask = AttentionMask(tokens, tokens, causal=causal, window=window).materialize()[0].tolist()
        part = {"kind": "attention", "causal": causal} | ({} if window is None else {"window": window})
        rows = "Array.from({length: 16}, (_, i) => Array.from({length: 16}, (_, j) => visible(part, i, j)))"
        drawn = page.evaluate(f"part => {rows}", part)
        assert drawn == mask
    draw = random.Random(3)
    for dims in (8, 64):
        base = draw.choice((10000.0, 500000.0))
        assert page.evaluate(f"pairFrequencies({dims}, {base})") == pytest.approx(inverse_frequencies(dims, base))
    slopes = AlibiConfig().build(12, True).slopes
    assert page.evaluate("Array.from({length: 12}, (_, h) => alibiSlope(h, 12))") == pytest.approx(list(slopes))
    for buckets, most in ((32, 128), (8, 20), (5, 9)):
        expected = buckets_by_offset(buckets, most, True)[most:]
        assert page.evaluate(f"Array.from({{length: {most + 1}}}, (_, d) => bucketOf(d, {buckets}, {most}))") == list(
            expected
        )
    table = sinusoidal_embedding(torch.arange(8)[None], 12, torch.float64)[0]
    drawn = page.evaluate("Array.from({length: 8}, (_, p) => Array.from({length: 12}, (_, d) => sinusoid(p, d, 12)))")
    assert torch.allclose(torch.tensor(drawn, dtype=torch.float64), table)
    check_norms(page)


SCALINGS: list[dict[str, Any]] = [
    {"kind": "linear", "factor": 4.0},
    {"kind": "ntk", "factor": 4.0},
    {"kind": "ntk", "factor": 4.0, "original_length": 1024},
    {"kind": "proportional", "rotated_share": 0.3},
    {"kind": "proportional", "rotated_share": 0.75, "factor": 4.0},
    {"kind": "llama3", "factor": 8.0, "original_length": 2048, "low_freq_factor": 2.0, "high_freq_factor": 9.0},
    {"kind": "longrope", "factor": 4.0, "original_length": 1024, "short_factor": [1.5] * 16, "long_factor": [2.5] * 16},
    {"kind": "yarn", "factor": 8.0, "original_length": 1024},
    {"kind": "yarn", "factor": 8.0, "original_length": 1024, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    {"kind": "yarn", "factor": 8.0, "original_length": 16, "beta_slow": 30.0},
]


def test_scalings_are_drawn_from_the_frequencies_of_heddle(chromium: Browser, explorers: dict[str, Path]) -> None:
    page = open_page(chromium, explorers["scalings"])
    assert {each["kind"] for each in SCALINGS} == set(kinds("scalings"))
    for scaling in SCALINGS:
        part = parse_config(kind_class("scalings", scaling["kind"]), {k: v for k, v in scaling.items() if k != "kind"})
        for tokens in (1024, 5000):
            expected = part.scale_frequencies(32, 10000.0, tokens, torch.float64).inv_freq  # type: ignore[attr-defined]
            drawn = page.evaluate(f"scaling => scaledFrequencies(scaling, 32, 10000, {tokens})", scaling)
            assert drawn == pytest.approx(expected, rel=1e-12), scaling


def test_a_chosen_scaling_is_the_design_that_is_built(
    chromium: Browser, explorers: dict[str, Path], tmp_path: Path
) -> None:
    page = open_page(chromium, explorers["design"])
    page.evaluate("document.getElementById('tab-scalings').click(); state.design.tokens = 32768; render()")
    seen = set()
    for kind in kinds("scalings"):
        page.evaluate(f"document.getElementById('kind-{kind}').click()")
        assert page.evaluate("$('refusals').textContent") == ""
        file = tmp_path / "design.yaml"
        file.write_text(page.evaluate("$('yaml').textContent"), encoding="utf-8")
        mixer = heddle.load_config(str(file)).dump()["layers"][0]["mixer"]
        assert mixer["position"]["scaling"]["kind"] == kind
        seen.add(page.evaluate("$('pictures').innerHTML"))
    assert len(seen) == len(kinds("scalings"))
    wrong = {"beta_fast": "0.5", "attention_factor": "-1"}
    page.evaluate("document.getElementById('kind-yarn').click()")
    for field, value in wrong.items():
        page.fill(f"[id='field.{field}']", value)
        assert f"scaling.{field}" in page.evaluate("$('refusals').textContent")
    assert errors(page) == []


def check_norms(page: Page) -> None:
    """The vector that the picture shows is that of the part itself."""
    x = torch.linspace(-1, 2, 14, dtype=torch.float64)
    for kind in ("rms", "layer"):
        norm = kind_class("norms", kind)().build(14).double()  # type: ignore[attr-defined]
        norm.init_weights(0.0, lambda name: None)
        drawn = page.evaluate(f"normedValues({{kind: '{kind}'}}, {x.tolist()})")
        assert torch.allclose(torch.tensor(drawn, dtype=torch.float64), norm(x)), kind
