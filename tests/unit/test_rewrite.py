"""An alias is replaced in the top-level `model`, and nowhere else."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prompt.rewrite import replace_model


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"gpt","x":1}', b'{"model":"org/m","x":1}'),
        (b'{ "model" :\n"gpt" , "n":1e3}', b'{ "model" :\n"org/m" , "n":1e3}'),
        (b'{"a":{"model":"gpt"},"model":"gpt"}', b'{"a":{"model":"gpt"},"model":"org/m"}'),
        (b'{"model":"gpt","a":{"model":"gpt"}}', b'{"model":"org/m","a":{"model":"gpt"}}'),
        (b'{"model":"gpt","t":"\\"model\\":\\"gpt\\""}', b'{"model":"org/m","t":"\\"model\\":\\"gpt\\""}'),
        (b'{"model":"one","model":"gpt"}', b'{"model":"one","model":"org/m"}'),
        (b'{"model":"g\\u0070t"}', b'{"model":"org/m"}'),
        (
            b'{"t":123456789012345678901234567890,"model":"gpt"}',
            b'{"t":123456789012345678901234567890,"model":"org/m"}',
        ),
    ],
)
def test_worked_examples(body: bytes, expected: bytes) -> None:
    assert replace_model(body, "org/m") == expected


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=6) | st.just("model"), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=6), json_values, max_size=4),
    st.text(st.characters(codec="utf-8"), max_size=8),
)
def test_only_the_model_changes(document: dict[str, object], name: str) -> None:
    document["model"] = "alias"
    rewritten = orjson.loads(replace_model(orjson.dumps(document), name))
    assert rewritten == {**document, "model": name}
