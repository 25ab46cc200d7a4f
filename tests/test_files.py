"""The text of sealed JSON files."""

import json

from hypothesis import given
from hypothesis import strategies as st

from became_avalanche.files import sealed_json, unsealed

NUMBERS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    NUMBERS | st.text(st.sampled_from('[]{}",\n 1\\a')),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("[a\n ]"), inner, max_size=4),
)


@given(VALUES)
def test_sealed_json_holds_its_content(value):
    assert unsealed(sealed_json({"schema_version": 1, "value": value}), "here", "a value", 1)["value"] == value


@given(st.lists(NUMBERS, min_size=1))
def test_a_list_of_numbers_is_on_one_line(numbers):
    lines = sealed_json({"rows": [numbers, []], "names": ["a", "b"]}).splitlines()
    assert json.dumps(numbers) in [line.strip(" ,") for line in lines]
    assert len(lines) == len(["{", "rows", "numbers", "[]", "]", "names", "a", "b", "]", "sha256", "}"])
