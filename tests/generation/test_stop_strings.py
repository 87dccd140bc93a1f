"""Stop strings are never shown, not even in part, however the text is split into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.errors import ConfigError
from heddle.generation.generate import StopStringBuffer


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """What the whole text gives: all before the first stop string."""
    matches = [text.find(stop) for stop in stops if stop in text]
    return (text[: min(matches)], True) if matches else (text, False)


@given(
    pieces=st.lists(st.text("ab\n", max_size=4), max_size=12),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_any_pieces_give_what_the_whole_gives(pieces: list[str], stops: list[str]) -> None:
    tail = StopStringBuffer(stops)
    shown = ""
    for piece in pieces:
        shown += tail.push(piece)
        # what is shown can never be part of a stop string that the rest would complete
        assert expected("".join(pieces), stops)[0].startswith(shown)
    shown += tail.finish()
    assert shown == tail.text
    # A longer stop string may begin earlier and end later than one that is met first, as pieces come.
    assert tail.stopped == expected("".join(pieces), stops)[1]
    if len(stops) <= 1:
        assert (shown, tail.stopped) == expected("".join(pieces), stops)


def test_text_is_held_back_only_while_it_may_be_a_stop() -> None:
    tail = StopStringBuffer(["\n\nEND"])
    assert tail.push("one\n") == "one"
    assert tail.push("\n") == ""
    assert tail.push("E") == ""
    assert tail.push("x") == "\n\nEx"
    assert tail.push("\n\nEN") == ""
    assert tail.finish() == "\n\nEN"
    assert not tail.stopped


def test_after_a_stop_nothing_comes() -> None:
    tail = StopStringBuffer(["."])
    assert tail.push("one. two") == "one"
    assert tail.push("three") == ""
    assert tail.finish() == ""
    assert tail.text == "one"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="stop:"):
        StopStringBuffer(["a", ""])
