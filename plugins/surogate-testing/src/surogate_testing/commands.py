"""Checks of commands: their name, their lines in `surogate --help`, and their own help."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from importlib import import_module

from surogate_core.plugin import bundles
from surogate_core.service.plugins import RESERVED, offered_commands
from surogate_testing.check import ensure


def has_one_or_two_words(spec: bundles.CommandSpec) -> None:
    """The name is one word or two, in lower case, and not the name of a task of the core."""
    words = spec.name.split(" ")
    ensure(len(words) <= 2, f"the name {spec.name!r} has {len(words)} words")
    ensure(
        all(word.replace("-", "").isalnum() and word == word.lower() for word in words), f"the name is {spec.name!r}"
    )
    ensure(words[0] not in RESERVED, f"the name is {spec.name!r}, and {words[0]} is the core's")


def is_listed_without_import(spec: bundles.CommandSpec) -> None:
    """`surogate --help` has it: its fields are literals in the module that the entry point names."""
    fields = ("name", "usage", "help", "main", "python", "rank", "example", "configured")
    wanted = [getattr(spec, field) for field in fields]
    found = [
        [getattr(offered, field) for field in fields] for offered in offered_commands() if offered.name == spec.name
    ]
    ensure(wanted in found, f"its source has {found}, not {wanted}")


def has_help_for_each_form(spec: bundles.CommandSpec) -> None:
    """Each line of `usage` begins with the first word of the name, and has a line of `help`."""
    forms, texts = spec.usage.split("\n"), spec.help.split("\n")
    ensure(len(forms) == len(texts), f"{len(forms)} lines of usage, {len(texts)} of help")
    ensure(all(texts), "a line of help is empty")
    word = spec.name.split(" ")[0]
    ensure(all(form.split(" ")[0] == word for form in forms), f"a line of usage does not begin with {word}")


def prints_its_usage(spec: bundles.CommandSpec) -> None:
    """With `--help` it prints its usage and ends with 0."""
    module, _, function = spec.main.partition(":")
    printed = io.StringIO()
    with redirect_stdout(printed):
        try:
            code = getattr(import_module(module), function)(["--help"])
        except SystemExit as end:
            code = end.code or 0
    ensure(code == 0, f"with --help it ends with {code}")
    ensure("usage" in printed.getvalue().lower(), "with --help it prints no usage")


def has_a_function_for_python(spec: bundles.CommandSpec) -> None:
    """What `python` names is a function with a docstring; most commands have none."""
    if not spec.python:
        return
    module, _, name = spec.python.partition(":")
    function = getattr(import_module(module), name, None)
    ensure(callable(function), f"{spec.python}: there is no such function")
    ensure(bool(function.__doc__), f"{spec.python} has no docstring")


CHECKS = (
    has_one_or_two_words,
    is_listed_without_import,
    has_help_for_each_form,
    prints_its_usage,
    has_a_function_for_python,
)
