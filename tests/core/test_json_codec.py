"""What peers send as JSON is a value within its declared bounds, or one sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe_flwr.core import bounds
from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.core.texts import LINE, MOST, make_printable, to_one_line
from tests.thorough import examples


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    name: bounds.Name
    rate: bounds.Rate | None = None
    steps: bounds.Count = 0
    loss: bounds.MaybeHuge = 0.0
    notes: Annotated[tuple[bounds.Seconds, ...], bounds.most_entries(3)] = ()
    why: Mapping[bounds.Name, bounds.Sentence] = field(default_factory=dict)
    free: float = 0.0
    text: str = ""
    number: int = 0


def sentence(text: str) -> str:
    with pytest.raises(ProtocolError) as refused:
        from_json(Told, text, "told", most=10_000)
    return str(refused.value)


@pytest.mark.parametrize(
    "told",
    [
        Told(name="attic/pi-1", rate=1e6, steps=3, loss=math.inf, notes=(0.5, 2.0)),
        Told(name="Dachboden/Gerät 1", why={"a": "it was late"}, free=math.inf, text="é\n\x1b"),
        Told(name="n" * 200, number=2**64 - 1),
    ],
)
def test_values_within_their_bounds_come_back(told: Told) -> None:
    assert from_json(Told, to_json(told), "told") == told


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": ""}, r"told\.name must be one line of 1 to 200 printable characters"),
        ({"name": "a\nb"}, "printable"),
        ({"name": "\u202ea"}, "printable"),
        ({"name": "\ud800"}, "a string of Unicode characters"),
        ({"text": "\udfff"}, "a string of Unicode characters"),
        ({"name": "n" * 10**6}, "characters; 10000 are allowed"),
        ({"rate": math.nan}, r"told\.rate must lie between 1 and 1e\+18, got nan"),
        ({"rate": 0}, "must lie between"),
        ({"rate": True}, "must be a number, got True"),
        ({"steps": -1}, "must lie between 0"),
        ({"steps": 2**63}, "must lie between 0"),
        ({"steps": 1.0}, "must be a whole number"),
        ({"number": 2**64}, "a whole number of at most 64 bits"),
        ({"number": 10**3000}, "a whole number of at most 64 bits, got a huge one"),
        ({"loss": 1e300}, "must lie between"),
        ({"loss": -math.inf}, "must lie between"),
        ({"notes": [1.0] * 4}, "must have at most 3 entries"),
        ({"notes": [1.0, math.nan]}, r"told\.notes\[1\] must lie between"),
        ({"why": {"a\n": "b"}}, "printable"),
        ({"why": {"k" * 500: "b"}}, "printable"),
        ({"why": {"a": "\x1b[2J"}}, r"told\.why\.a must be one line"),
        ({"x\x1b" * 100: 1}, "unknown key"),
    ],
)
def test_what_is_beyond_them_is_one_line_that_names_the_place(change, words: str) -> None:
    said = sentence(json.dumps({"name": "a", **change}))
    assert said.isprintable() and len(said) < 400
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(said)


def test_a_key_that_is_there_twice_is_refused() -> None:
    assert "names a key twice" in sentence('{"name": "a", "name": "b"}')


@pytest.mark.parametrize("text", ["", "[" * 9000, '{"a":' * 1500, "7" * 5000, '"\\ud800"', "nul"])
def test_what_is_no_json_of_this_kind_is_one_line(text: str) -> None:
    assert sentence(text).isprintable()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(["name", "rate"]), inner)
    ),
    max_leaves=8,
)
fields = st.sampled_from(["name", "rate", "steps", "loss", "notes", "why", "free", "text"])


@examples(80, 300, derandomize=True)
@given(values | st.dictionaries(fields, values) | st.text())
def test_anything_is_a_value_or_a_protocol_error(data: object) -> None:
    text = (
        data
        if isinstance(data, str)
        else json.dumps({"name": "a", **data})
        if isinstance(data, dict)
        else json.dumps(data)
    )
    try:
        found = from_json(Told, text, "told")
    except ProtocolError as error:
        assert str(error).isprintable()
    else:
        assert found.name.isprintable() and 0 <= found.steps <= 2**40
        assert found.rate is None or 1 <= found.rate < math.inf


@given(st.text(st.characters(categories=None)))
def test_words_of_strangers_are_fit_for_a_screen(text: str) -> None:
    assert to_one_line(text).isprintable()
    assert "\n" not in to_one_line(text) and len(to_one_line(text)) <= LINE
    to_one_line(text).encode()
    assert all(line.isprintable() for line in make_printable(text).replace("\t", "").split("\n"))


def test_the_words_of_an_honest_peer_stay_as_they_are() -> None:
    words = "pi-1 antwortet nicht: prüfe das Netz 😀"
    assert to_one_line(words) == make_printable(words) == words
    assert len(make_printable("x" * 10 * MOST)) < MOST + 10
