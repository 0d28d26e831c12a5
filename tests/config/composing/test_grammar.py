"""Values into Hydra's override grammar and back."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from surogate_core.config.composing.grammar import NotWritableError, encode, parse_override

keys = st.from_regex(r"[A-Za-z_][A-Za-z0-9_./-]{0,10}", fullmatch=True).filter(
    lambda k: k.lower() not in ("true", "false", "null", "inf", "nan")
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=8
)


def same(a: Any, b: Any) -> bool:
    """Equal, with the same types throughout."""
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@settings(max_examples=300, deadline=None)
@given(values)
def test_hydra_reads_back_what_is_encoded(value: Any) -> None:
    override = parse_override(f"key={encode(value)}")
    assert not override.is_sweep_override()
    assert same(override.value(), value)


@settings(max_examples=150, deadline=None)
@given(values.filter(lambda v: "$" not in repr(v) and "???" not in repr(v)))
def test_the_composed_config_holds_it(value: Any) -> None:
    config = OmegaConf.create({"key": None})
    OmegaConf.update(config, "key", parse_override(f"key={encode(value)}").value())
    assert same(OmegaConf.to_container(config, resolve=True)["key"], value)  # type: ignore[index,call-overload]


@pytest.mark.parametrize(
    "text",
    [
        "a,b",
        "null",
        "'",
        '"',
        "\\",
        "\\'",
        "a\\",
        "${x}",
        "1",
        "true",
        "[1]",
        "{a:1}",
        "f(x)",
        " a ",
        "é\n\t",
        "",
        "a=b",
    ],
)
def test_awkward_text(text: str) -> None:
    assert parse_override(f"key={encode(text)}").value() == text


def test_numbers_that_are_not() -> None:
    assert encode(math.inf) == "inf"
    assert encode(-math.inf) == "-inf"
    assert math.isnan(parse_override(f"key={encode(math.nan)}").value())  # type: ignore[arg-type]
    assert encode(2e-4) == "0.0002"


@pytest.mark.parametrize("value", [{"a b'": 1}, {"null": 1}, {True: 1}, {"é": 1}, object(), {1, 2}])
def test_what_the_grammar_cannot_write(value: Any) -> None:
    with pytest.raises(NotWritableError):
        encode(value)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("model=~/models/a", "~/models/a"),
        ("run_name=naïve", "naïve"),
        ("output_dir=/a/b=c", "/a/b=c"),
        ("run_name=#1 & more", "#1 & more"),
        ("model=s3://bucket/x", "s3://bucket/x"),
    ],
)
def test_bare_text_that_hydra_would_refuse(argument: str, value: str) -> None:
    assert parse_override(argument).value() == value


@pytest.mark.parametrize("argument", ["a=[", "a={b}", "a b=1", "a='x", "x=f(", "word"])
def test_what_is_no_override(argument: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_override(argument)
    assert "\n" not in str(raised.value)
