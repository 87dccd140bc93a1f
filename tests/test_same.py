"""tools/same.py finds a difference in every section, and names what is declared, within its bounds."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from heddle.machine import measured_choices
from heddle.runtime import EARLIER_CHOICES
from tools import same, same_commands, same_sections

FACTS: dict[str, Any] = {
    "logits": {"cases:attention-mha": {"draws": "0a", "logits": "1b", "costs": [5, 5, 70.0, 8]}},
    "families": {"llama:plain": {"config": {"head_dim": 8}, "files": {"model.safetensors": "2c"}}},
    "training": {"dense resumed": {"log": [{"step": 1, "loss": 5.5}, {"step": 2, "loss": 5.25}]}},
    "reports": {"two": {"designs": [{"name": "a", "bits_per_byte": {"mean": 4.5}}], "verdict": ["No lead"]}},
    "files": {"model": {"config.json": "3d", "manifest.json": "4e"}},
    "options": {"read": {"compare a --seeds 2": {"code": 0, "values": {"--seeds": 2, "--recall": "auto"}}}},
    "api": {"__all__": ["build", "save"], "build": ["positional or keyword config"]},
}  # fmt: skip
PLANTED: dict[str, tuple[tuple[str | int, ...], Any]] = {
    "logits": (("cases:attention-mha", "logits"), "1c"),
    "families": (("llama:plain", "config", "head_dim"), 9),
    "training": (("dense resumed", "log", 1, "loss"), 5.26),
    "reports": (("two", "designs", 0, "bits_per_byte", "mean"), 4.6),
    "files": (("model", "manifest.json"), "4f"),
    "options": (("read", "compare a --seeds 2", "values", "--seeds"), 3),
    "api": (("build",), ["positional or keyword design"]),
}


def altered(facts: Any, path: Sequence[str | int], value: Any) -> Any:
    """A copy with another value at a path."""
    copy = json.loads(json.dumps(facts))
    at = copy
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    return copy


def report(old: Any, new: Any, section: str = "api", names: Any = ()) -> tuple[str, bool]:
    lines, is_same = same.compare([section], lambda _: (old, new), list(names))
    return "\n".join(lines), is_same


def name(path: str, reason: str = "meant", **rule: Any) -> same.Name:
    return same.Name.read({"path": path, "reason": reason, **rule})


def test_every_section_has_a_planted_difference() -> None:
    assert list(same.SECTIONS) == list(same_sections.SECTIONS) == list(FACTS) == list(PLANTED)


@pytest.mark.parametrize("section", same.SECTIONS)
def test_a_planted_difference_is_found_and_can_be_named(section: str) -> None:
    keys, value = PLANTED[section]
    old, new = FACTS[section], altered(FACTS[section], keys, value)
    path = ".".join([section, *map(str, keys)])
    assert report(old, old, section) == (report(old, old, section)[0], True)
    assert report(old, old, section)[0].endswith("EQUAL")
    text, is_same = report(old, new, section)
    assert not is_same
    assert f"{path}\n" in text
    before = old
    for key in keys:
        before = before[key]
    text, is_same = report(old, new, section, [name(path, changed=[before, value])])
    assert is_same
    assert f"{section}: 1 named: meant" in text
    assert text.endswith("EQUAL BUT FOR WHAT IS NAMED")
    text, is_same = report(old, new, section, [name(path, changed=[before, "something else"])])
    assert not is_same
    assert "stale: " in text


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ({"a": 1}, {"a": 1, "b": None}, "api.b"),
        ({"a": 1, "b": []}, {"a": 1}, "api.b"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "api order"),
        ({"a": [{}, {}]}, {"a": [{}]}, "api.a length"),
        ({"a": 1}, {"a": 1.0}, "api.a"),
        ({"a": {"b": 1}}, {"a": 1}, "api.a"),
        ({"a": []}, {"a": [{"b": 1}]}, "api.a"),
    ],
)
def test_what_is_missing_added_or_moved_differs(old: Any, new: Any, path: str) -> None:
    text, is_same = report(old, new)
    assert not is_same
    assert text.startswith(f"{path}\n")


def test_a_section_that_cannot_be_computed_is_different_whatever_is_declared() -> None:
    def facts(_: str) -> Any:
        raise RuntimeError("api of there failed")

    lines, is_same = same.compare(["api"], facts, [name("*", gone=True)])
    assert not is_same
    assert lines[0] == "api of there failed"


def test_what_is_measured_is_masked_and_nothing_else() -> None:
    facts = {"loss": 1.5, "seconds": 2.0, "head": {"tied": True}, "log": {"head": "0a"}, "verdict": ["4 seeds, 34 s"]}
    other = altered(altered(facts, ["seconds"], 3.0), ["verdict"], ["4 seeds, 51 s"])
    assert same_sections.masked(facts) == same_sections.masked(altered(other, ["log", "head"], "1b"))
    for path, value in ((["loss"], 1.25), (["head", "tied"], False), (["verdict"], ["5 seeds, 34 s"])):
        assert same_sections.masked(facts) != same_sections.masked(altered(facts, path, value))


def test_the_style_and_the_values_of_a_json_file_are_compared(tmp_path: Path) -> None:
    texts = (
        '{"a": 1, "seconds": 2.5}', '{"a": 1, "seconds": 3}', '{"a": 1,"seconds": 3}', '{"seconds": 3, "a": 1}',
        '{"a": 1, "seconds": 3}\n', '{"a": 1.0, "seconds": 3}', '{"a":1,"seconds":3}', '{\n "a": 1,\n "seconds": 3\n}',
    )  # fmt: skip
    found = []
    for text in texts:
        (tmp_path / "run.json").write_text(text)
        found.append(same_sections.folder_facts(tmp_path, ("run.json",)))
    assert report(found[0], found[1])[1]
    for index, other in enumerate(found[2:], 2):
        assert not report(found[1], other)[1], texts[index]


def test_a_manifest_says_whether_it_is_right_about_files_compared_by_value(tmp_path: Path) -> None:
    content = b'{"a": 1}'
    (tmp_path / "training.json").write_bytes(content)
    for sha, size, expected in (
        (hashlib.sha256(content).hexdigest(), 8, {"sha256": "of the file", "size": "of the file"}),
        ("0a", 8, {"sha256": "0a", "size": "of the file"}),
        (hashlib.sha256(content).hexdigest(), 9, {"sha256": "of the file", "size": 9}),
    ):
        files = {"training.json": {"sha256": sha, "size": size}, "model.safetensors": {"sha256": "1b", "size": 3}}
        (tmp_path / "manifest.json").write_text(json.dumps({"files": files}))
        facts = same_sections.folder_facts(tmp_path, same_sections.RUN_FILES)["manifest.json"]["values"][0]["files"]
        assert facts["training.json"] == expected
        assert facts["model.safetensors"] == {"sha256": "1b", "size": 3}


# Of each rule: a bound, a pair (old, new) that it permits, and pairs that it does not.
RULES: dict[str, tuple[Any, tuple[Any, Any], list[tuple[Any, Any]]]] = {
    "added": (1, (same.ABSENT, 1), [(same.ABSENT, 1.0), (same.ABSENT, 2), (0, 1), (1, same.ABSENT)]),
    "added like": ("[0-9a-f]{4}|5", (same.ABSENT, 5), [(same.ABSENT, 55), (same.ABSENT, "x"), (5, 5.0), ("5", 5)]),
    "changed": ([3, None], (3, None), [(2, None), (3, 0), (3, same.ABSENT), (None, 3), (3.0, None)]),
    "gone": (True, (3, same.ABSENT), [(3, 4), (same.ABSENT, 3), (3, None)]),
    "relative": (1e-6, ([2.0, 5], [2.0000001, 5]), [
        ([2.0, 5], [2.00001, 5]), ([2.0, 5], [2.0, 6]), ([2.0], [2.0, 5]), (2.0, 2), (2.0, "2"), (2.0, same.ABSENT),
        (float("nan"), 2.0), (2.0, float("nan")), (2.0, float("inf")), (2.0, None),
        (0.0, 1e-30), (1.0, -1.0), (True, 1.0), (5, 6),
    ]),
    "absolute": (1e-7, (1e-9, -1e-9), [(1e-9, 2e-7), (5, 6), (2.0, float("nan")), (float("inf"), 2.0)]),
    "words": ({"luck": "variance", "+": "Slow: [0-9]+ %"}, (["4 by luck"], ["4 by variance", "Slow: 40 %"]), [
        (["4 by luck"], ["5 by variance"]), (["4 by luck"], ["4 by luck"]), (["4 by luck"], ["4 by variance", "Slow"]),
        (["4 by luck"], []), (["4 by luck"], same.ABSENT), (["4 by luck", "Slow: 40 %"], ["4 by variance"]),
    ]),
    "reordered": (True, (["a", "b"], ["b", "a"]), [(["a", "b"], ["b"]), ("a b", "b c"), (["a"], same.ABSENT), (1, 2)]),
}  # fmt: skip


@pytest.mark.parametrize("rule", same.RULES)
def test_a_rule_permits_what_is_meant_and_no_more(rule: str) -> None:
    bound, (old, new), others = RULES[rule]
    meant = name("api.a", **{rule: bound})
    assert meant.permits(old, new)
    for before, after in others:
        assert not meant.permits(before, after), (before, after)


def test_what_goes_beyond_its_name_is_different_and_says_so() -> None:
    old, new = {"a": 1.0, "b": 1.0}, {"a": 1.0000001, "b": 1.01}
    text, is_same = report(old, new, names=[name("api.*", relative=1e-6)])
    assert not is_same
    assert text.startswith("api.b  (more than api.*, relative 1e-06)\n")
    assert "api.a" not in text


def test_a_name_keeps_out_of_what_it_excepts() -> None:
    default = name("api.compare *.--seeds", changed=[3, None], unless="* --seeds *")
    assert report({"compare a": {"--seeds": 3}}, {"compare a": {"--seeds": None}}, names=[default])[1]
    line = "compare a --seeds 3"
    assert not report({line: {"--seeds": 3}}, {line: {"--seeds": None}}, names=[default])[1]


def test_a_name_that_matches_nothing_is_listed_as_stale_where_its_section_was_compared() -> None:
    names = [name("api.b", "of old", gone=True), name("logits.b", "elsewhere", gone=True)]
    text, is_same = report({"a": 1}, {"a": 1}, names=names)
    assert is_same
    assert "stale: api.b, gone true matches nothing here: of old" in text
    assert "elsewhere" not in text


def test_the_committed_names_permit_no_common_fault() -> None:
    faults: list[tuple[Any, Any]] = [
        (1, 2), (2, 1), (1.0, 1.001), (0.0, 0.001), ("a", "b"), ([1], [2]), ([1, 2], [1]), ([1.0, 5], [1.0, 6]),
        (True, False), ("0a" * 32, "1b" * 32), (None, 1), (1, None), (1.5, None), (same.ABSENT, 12345),
        (same.ABSENT, "?"), (same.ABSENT, {}),
    ]  # fmt: skip
    for meant in committed():
        assert [fault for fault in faults if meant.permits(*fault)] == [], str(meant)
        if meant.rule != "gone":
            assert not meant.permits(1, same.ABSENT), str(meant)
        assert len(meant.path.split(".")) >= 2, str(meant)


EXAMPLES: list[tuple[str, Any, Any, Any]] = [  # path, OLD, NEW that has a name, NEW that has none
    ("families.qwen3_5_text:plain.config.mamba_ssm_dtype", same.ABSENT, "float32", "bfloat16"),
    ("training.dense.log.2.validation_bits_per_byte", 2.282635936469473, 2.282635930688544, 2.282636),
    ("training.moe.files.training.json.values.0.run", same.ABSENT, "0a" * 32, "0a"),
    ("files.run.run.json.values.0.runtime.choices", same.ABSENT, EARLIER_CHOICES.dump(), {"matmul": "low"}),
    ("reports.two.designs.0.runs.0.windows.0", [121.03450417983478, 54], [121.03450280397357, 54], [121.0346, 54]),
    ("reports.two.designs.0.runs.0.windows.1", [121.03450417983478, 54], [121.03450417983478, 54], [121.0345, 55]),
    ("reports.vary.pairs.0.mean", -2.987295288559011e-05, -2.9856573585007595e-05, -3.1e-05),
    ("options.read.compare a.values.--seeds", 3, None, 2),
    ("options.read.train a.values.--qk-clip", same.ABSENT, None, 100.0),
    ("options.read.check a --quiet.values.--quiet", True, same.ABSENT, False),
    ("api.fields.AttentionConfig.chunked", same.ABSENT, "False", "True"),
    ("api.Layout.attention_mask", ["self"], ["self", "positional or keyword chunked=False"], ["self", "chunked"]),
]
NAMELESS: list[tuple[str, Any, Any]] = [
    ("families.llama:plain.config.mamba_ssm_dtype", same.ABSENT, "float32"),
    ("families.llama:plain.back.logits", "0a", "1b"),
    ("training.dense.log.0.gradient_norm", 0.9796488285064697, 0.9796488881111145),
    ("training.dense.log.2.loss", 5.6944899559021, 5.694489955902099),
    ("training.moe.log.2.validation_bits_per_byte", 2.282635936469473, 2.282635936469472),
    ("training.dense.files.manifest.json.values.0.files.model.safetensors.sha256", "0a" * 32, "1b" * 32),
    ("reports.recall.designs.0.recall.parity.accuracy", 0.59051513671875, 0.59051513671874),
    ("reports.converted.models.1.layer_errors.0.mixer", 0.1, 0.10000000000000002),
    ("options.read.compare a --seeds 3.values.--seeds", 3, None),
    ("options.read.train a.values.--seeds", 3, None),
    ("options.read.check a.code", 0, 2),
    ("options.run.verify nowhere", 2, 1),
    ("api.fields.AttentionConfig.heads", "4", "8"),
    ("api.generate", ["model"], ["model", "keyword-only seed=0"]),
]


def test_the_committed_names_name_their_examples_and_nothing_beside() -> None:
    def named(path: str, old: Any, new: Any) -> bool:
        return any(meant.is_of(path) and meant.permits(old, new) for meant in committed())

    for path, old, new, other in EXAMPLES:
        assert named(path, old, new), path
        assert not named(path, old, other), path
    assert [fault for fault in NAMELESS if named(*fault)] == []


def committed() -> list[same.Name]:
    return same.read_names(json.loads(same.NAMED.read_text(encoding="utf-8")), declared()["options"])


def test_what_is_computed_in_float64_has_no_name() -> None:
    assert [str(meant) for meant in committed() if fnmatchcase("logits.cases:attention-mha.logits", meant.path)] == []
    assert {meant.path.partition(".")[0] for meant in committed()} <= set(same.SECTIONS) - {"logits"}


def test_both_sides_use_the_kernels_of_versions_that_measured_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def run(words: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        monkeypatch.setenv("HEDDLE_MACHINE", env["HEDDLE_MACHINE"])
        found.append(measured_choices())
        Path(words[-2]).write_text("{}")
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(same.subprocess, "run", run)
    for side in ("old", "new"):
        same.run_section("training", same.HERE.parent, tmp_path / side, None)
    assert found == [EARLIER_CHOICES] * 2


def test_a_command_leaves_its_float32_products_to_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "heddle.__main__", raising=False)  # an earlier test may have imported it
    torch.set_float32_matmul_precision("medium")
    assert same_sections.Probe(tmp_path, None).run("--version")["code"] == 0
    assert torch.get_float32_matmul_precision() == "highest"


def declared() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(same.MAP.read_text(encoding="utf-8"))
    return content


def test_random_lines_have_every_option_of_every_verb() -> None:
    verbs = same_commands.described()
    lines = same_commands.random_lines(verbs, declared()["samples"], number=200, seed=11)
    assert len(lines["read"]) == 200
    drawn = {(line[0][0], group[0]) for line in lines["read"] for group in line[1:]}
    options = [(verb, {word.name, word.negative}) for verb, words in verbs.items() for word in words if word.is_option]
    assert [(verb, names) for verb, names in options if not drawn & {(verb, name) for name in names}] == []


def test_lines_are_read_as_values_and_refused_with_a_code() -> None:
    read = same_commands.parsed(
        ["train", "preset:gqa-tiny", "--lr", "0.5", "--data", "a", "--data", "b", "--no-compile"]
    )
    expected = {
        "design": "preset:gqa-tiny",
        "--lr": 0.5,
        "--data": ["a", "b"],
        "--compile": False,
        "--out": "runs/train",
    }
    assert {name: read["values"][name] for name in expected} == expected
    assert {same_commands.parsed(line)["code"] for line in (["train", "--lr", "much"], ["weave"], ["import"])} == {2}


def test_declared_options_are_translated_and_what_is_gone_is_named() -> None:
    entries: list[dict[str, Any]] = [
        {"old": "compare --seeds", "new": "compare --runs", "reason": "r"},
        {"old": "compare --recall", "new": None, "reason": "nobody reads it", "remedy": "leave it out"},
        {"old": "inspect", "new": "show attention", "reason": "r"},
        {"old": "runs --prune", "new": "runs prune --keep", "reason": "r"},
    ]
    lines = {
        "compare --runs 2 a": [["compare"], ["--seeds", "2"], ["--recall", "none"], ["a"]],
        "show attention run --text x": [["inspect"], ["run"], ["--text", "x"]],
        "runs prune --keep 2": [["runs"], ["--prune", "2"]],
    }
    assert [" ".join(same_commands.translated(line, entries)) for line in lines.values()] == list(lines)
    names = same.read_names([], entries)
    old = FACTS["options"]
    new = {"read": {"compare a --seeds 2": {"code": 0, "values": {"--seeds": 2}}}}
    assert not report(old, new, "options")[1]
    text, is_same = report(old, new, "options", names)
    assert is_same
    assert "leave it out" in text


def test_an_entry_without_a_reason_or_a_narrow_rule_is_refused() -> None:
    for entry in (
        {"gone": True, "reason": ""}, {"gone": True}, {"reason": "r"}, {"reason": "r", "gone": True, "added": 1},
        {"reason": "r", "gone": True, "in": 1}, {"reason": "r", "relative": 0.01}, {"reason": "r", "absolute": 0},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"same_named\.json"):
            same.read_names([{"path": "api.*", **entry}], [])
    for option in ({"old": "a --b", "new": None, "reason": "r"}, {"old": "a --b", "new": "a --c"}):
        with pytest.raises(ValueError, match="no reason, or no remedy"):
            same.read_names([], [option])
