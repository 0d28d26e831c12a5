"""The lines of a command's help, and the names of flags that share one."""

from __future__ import annotations

from surogate_commands.flags import FILTERS, Flag, shown


def test_help_is_wrapped_in_its_column_and_begins_below_a_long_form() -> None:
    short = Flag("switch", "--json", f"print JSON {'word ' * 25}\nand more")
    first, second, third, own, below, *rest = shown(
        [short, Flag("text", "--samples-output FILE", "writes")]
    ).splitlines()
    assert first.startswith("  --json               print JSON word")
    assert second == f"{'':23}{'word ' * (25 - first.count('word'))}".rstrip()
    assert (third, own, below, rest) == (f"{'':23}and more", "  --samples-output FILE", f"{'':23}writes", [])


def test_one_line_may_have_several_flags() -> None:
    assert FILTERS.names == ["--top-k", "--top-p", "--min-p", "--repetition-penalty"]
    assert shown([FILTERS]) == f"  {FILTERS.form}\n"
