"""tools/same.py finds a difference in every section, and names what is declared."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

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


def report(old: Any, new: Any, section: str = "api", expected: Any = ()) -> tuple[str, bool]:
    lines, is_same = same.compare([section], lambda _: (old, new), list(expected))
    return "\n".join(lines), is_same


def test_every_section_has_a_planted_difference() -> None:
    assert list(same.SECTIONS) == list(same_sections.SECTIONS) == list(FACTS) == list(PLANTED)


@pytest.mark.parametrize("section", same.SECTIONS)
def test_a_planted_difference_is_found_and_can_be_named(section: str) -> None:
    names, value = PLANTED[section]
    old, new = FACTS[section], altered(FACTS[section], names, value)
    path = ".".join([section, *map(str, names)])
    assert report(old, old, section)[1]
    text, is_same = report(old, new, section)
    assert not is_same
    assert f"{path}\n" in text
    text, is_same = report(old, new, section, [{"path": path, "reason": "meant"}])
    assert is_same
    assert "meant" in text


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

    lines, is_same = same.compare(["api"], facts, [{"path": "*", "reason": "anything"}])
    assert not is_same
    assert lines[0] == "api of there failed"


def test_what_is_measured_is_masked_and_nothing_else() -> None:
    facts = {"loss": 1.5, "seconds": 2.0, "head": {"tied": True}, "log": {"head": "0a"}, "verdict": ["4 seeds, 34 s"]}
    other = altered(altered(facts, ["seconds"], 3.0), ["verdict"], ["4 seeds, 51 s"])
    assert same_sections.masked(facts) == same_sections.masked(altered(other, ["log", "head"], "1b"))
    for path, value in ((["loss"], 1.25), (["head", "tied"], False), (["verdict"], ["5 seeds, 34 s"])):
        assert same_sections.masked(facts) != same_sections.masked(altered(facts, path, value))


def test_the_form_of_a_measured_file_is_compared(tmp_path: Path) -> None:
    texts = ('{"a": 1, "seconds": 2.5}', '{"a": 1, "seconds": 3}', '{"a": 1,"seconds": 3}', '{"seconds": 3, "a": 1}')
    found = []
    for text in texts:
        (tmp_path / "run.json").write_text(text)
        found.append(same_sections.folder_facts(tmp_path, ("run.json",))["run.json"]["form"])
    assert found[0] == found[1]
    assert len(set(found)) == 3


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
    expected = same.expected_differences({"expected": [], "options": entries})
    old = FACTS["options"]
    new = {"read": {"compare a --seeds 2": {"code": 0, "values": {"--seeds": 2}}}}
    assert not report(old, new, "options")[1]
    text, is_same = report(old, new, "options", expected)
    assert is_same
    assert "leave it out" in text


def test_an_entry_without_a_reason_is_refused() -> None:
    same.expected_differences(declared())
    for entry in ({"path": "api.*"}, {"path": "api.*", "reason": ""}):
        with pytest.raises(ValueError, match="no reason"):
            same.expected_differences({"expected": [entry], "options": []})
    with pytest.raises(ValueError, match="no remedy"):
        same.expected_differences({"expected": [], "options": [{"old": "a --b", "new": None, "reason": "r"}]})
