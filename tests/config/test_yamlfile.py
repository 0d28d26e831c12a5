"""Flat YAML: numbers as people write them, lines, and mistakes with their place."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from surogate_core.config.yamlfile import plain_scalar, read_yaml, write_yaml
from surogate_core.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-4", 2e-4),
        ("1E5", 1e5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-3", -3),
        ("1_000", 1000),
        ("007", "007"),
        ("true", True),
        ("FALSE", False),
        ("yes", "yes"),
        ("no", "no"),
        ("~", None),
        ("null", None),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("e5", "e5"),
        (".", "."),
        (".inf", math.inf),
    ],
)
def test_plain_scalars(text: str, value: Any) -> None:
    found = plain_scalar(text)
    assert found == value
    assert type(found) is type(value)


def test_quoted_scalars_are_text(tmp_path: Path) -> None:
    file = read_yaml(write(tmp_path, "a: '2e-4'\nb: \"true\"\nc: |\n  5\n"))
    assert file.values == {"a": "2e-4", "b": "true", "c": "5\n"}


def test_every_key_and_item_has_its_line(tmp_path: Path) -> None:
    file = read_yaml(write(tmp_path, "a: 1\nb:\n  c: [1,\n      2]\ndatasets:\n  - path: x\n    type: text\n"))
    assert file.where("b.c.1").endswith("run.yaml:4")
    assert file.where("datasets.0.type").endswith("run.yaml:7")
    assert file.where("datasets.0.type.deeper").endswith("run.yaml:7")


def test_a_key_that_is_there_twice(tmp_path: Path) -> None:
    file = read_yaml(write(tmp_path, "a: 1\nb:\n  c: 1\n  c: 2\na: 3\n"))
    assert [(p.key, p.where.rpartition(":")[2]) for p in file.problems] == [("b.c", "4"), ("a", "5")]


def test_anchors_and_merges(tmp_path: Path) -> None:
    text = "x: &d {type: text, split: train}\ny:\n  - {<<: *d, path: a}\n  - {<<: *d, path: b, split: test}\n"
    file = read_yaml(write(tmp_path, text))
    assert file.values["y"] == [
        {"type": "text", "split": "train", "path": "a"},
        {"type": "text", "split": "test", "path": "b"},
    ]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", 3, "expected"),
        ("- a\n- b\n", 1, "key: value"),
        ("just text", 1, "key: value"),
        ("a: 1\n\tb: 2\n", 2, "tab"),
        ("a: 1\n---\nb: 2\n", 2, "document"),
    ],
)
def test_what_is_not_a_config_file(tmp_path: Path, text: str, line: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        read_yaml(write(tmp_path, text))
    assert raised.value.problems[0].where.endswith(f"run.yaml:{line}")


def test_tags_never_make_objects(tmp_path: Path) -> None:
    file = read_yaml(write(tmp_path, "a: !!python/object/apply:os.system ['true']\nb: !mine x\n"))
    assert any(p.key == "b" and "not allowed" in p.message for p in file.problems)
    assert file.values["a"] == ["true"]


def test_an_alias_that_contains_itself(tmp_path: Path) -> None:
    file = read_yaml(write(tmp_path, "a: &x [*x]\n"))
    assert "contains itself" in file.problems[0].message


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_yaml(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_yaml(tmp_path / "latin.yaml")
    assert read_yaml(write(tmp_path, "# nothing\n")).values == {}


def test_aliases_that_mean_billions_of_values_end_at_once(tmp_path: Path) -> None:
    """Each of eight lines repeats the one before nine times."""
    lists = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
    )
    mappings = "a0: &a0 {k: 1}\n" + "".join(
        f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}\n" for i in range(1, 9)
    )
    merges = "a0: &a0 {a: 1, b: 2}\n" + "".join(
        f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 9)
    )
    for text in (lists, mappings, merges):
        with pytest.raises(ConfigError, match=r"more than 10,000 values") as raised:
            read_yaml(write(tmp_path, text))
        (problem,) = raised.value.problems
        assert problem.where.startswith(f"{tmp_path}/run.yaml:")


@pytest.mark.parametrize("depth", [40, 200, 5000])
@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_deep_nesting_is_one_message(tmp_path: Path, depth: int, brackets: str) -> None:
    opening, closing = brackets[0] + ("a: " if brackets == "{}" else ""), brackets[1]
    text = "a: " + opening * depth + closing * depth
    with pytest.raises(ConfigError, match="nested too deeply; at most 32"):
        read_yaml(write(tmp_path, text))


def test_a_mapping_that_merges_itself(tmp_path: Path) -> None:
    file = read_yaml(write(tmp_path, "a: &x\n  b: 1\n  <<: *x\n"))
    assert file.values == {"a": {"b": 1}}
    assert [p.message for p in file.problems] == ["an alias contains itself."]


def test_only_a_mapping_can_be_merged(tmp_path: Path) -> None:
    file = read_yaml(write(tmp_path, "a:\n  b: 1\n  <<: 3\n"))
    assert [(p.key, p.message) for p in file.problems] == [("a.<<", "only mappings can be merged.")]


def test_files_that_are_no_config_file(tmp_path: Path) -> None:
    """A pipe that nobody writes to, a device without an end, a directory, a data file."""
    fifo = tmp_path / "fifo.yaml"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"a pipe or a device. Fix: write it to a file first"):
            read_yaml(path)
    with pytest.raises(ConfigError, match=r"it is a directory. Fix: name a file in it"):
        read_yaml(tmp_path)
    (tmp_path / "large.yaml").write_text("# " + "x" * (1 << 20))
    with pytest.raises(ConfigError, match=r"1,048,578 bytes; a config file has at most 1,048,576"):
        read_yaml(tmp_path / "large.yaml")
    (tmp_path / "nul.yaml").write_bytes(b"a: x\0y\n")
    with pytest.raises(ConfigError, match="#x0000"):
        read_yaml(tmp_path / "nul.yaml")


def test_a_misspelt_file_names_the_one_that_is_there(tmp_path: Path) -> None:
    write(tmp_path, "a: 1\n")
    with pytest.raises(ConfigError, match=rf"there is no such file. Fix: {tmp_path}/run.yaml"):
        read_yaml(tmp_path / "rnu.yaml")


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@example(values={"a": "next\x85line"})
@example(values={"a": "line\u2028separator"})
@given(values=st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), plain, max_size=4))
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    keys = {k for k in values if k in ("null", "true", "false", "yes", "no", "on", "off", "y", "n")}
    text = write_yaml({k: v for k, v in values.items() if k not in keys})
    file = read_yaml(write(tmp_path_factory.mktemp("yaml"), text))
    assert file.values == {k: v for k, v in values.items() if k not in keys}
