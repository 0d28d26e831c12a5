"""The parser of `generate`, `chat` and `eval` sorts words and names what it does not know."""

from __future__ import annotations

import pytest

from surogate_commands.flags import FILTERS, Flag
from surogate_commands.words import Flags
from surogate_core.plugin import UserError

FLAGS = Flags(
    command="surogate try",
    flags=(
        Flag("text", "--output FILE"),
        Flag("list", "--stop TEXT"),
        Flag("count", "--samples N"),
        Flag("switch", "--json"),
        FILTERS,
    ),
)


def test_words_are_sorted_by_kind() -> None:
    found = FLAGS.read(
        ["a", "+recipe=fp8", "--json", "--stop=x=y", "b", "max_rows=2", "--stop", "z", "--samples", "3", "--top-p=0.5"]
    )

    assert found.models == ["a", "b"]
    assert found.overrides == ["+recipe=fp8", "max_rows=2"]
    assert found.switches == {"--json"}
    assert found.lists == {"--stop": ["x=y", "z"]}
    assert found.counts == {"--samples": 3}
    assert found.sampling == {"--top-p": 0.5}


def test_the_last_text_counts() -> None:
    assert FLAGS.read(["--output", "a", "--output=b"]).texts == {"--output": "b"}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--outptu", "x"], "--outptu is not known. Fix: --output"),
        (["--zz"], "`surogate try --help` shows the form"),
        (["--json=false"], "is a switch and takes no value"),
        (["--output"], "a value must follow"),
        (["--samples", "0"], "--samples"),
        (["a", "a"], "a is named twice"),
    ],
)
def test_wrong_words_are_named_with_a_fix(argv: list[str], says: str) -> None:
    with pytest.raises(UserError) as caught:
        FLAGS.read(argv)
    assert says in str(caught.value)


def test_flags_of_sampling_are_known_only_where_they_apply() -> None:
    with pytest.raises(UserError, match="--top-p is not known"):
        Flags(command="surogate try").read(["--top-p", "0.5"])
