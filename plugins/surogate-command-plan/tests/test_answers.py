"""A plan that was made before is the same to the byte, and imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from surogate_command_plan import command

WORDS = ["model=qwen3", "model.preset=tiny", "lmhead_chunks=1"]
HEAVY = ("torch", "transformers", "sympy", "pandas")


def test_the_second_answer_is_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("surogate_core.setup.kept._code", lambda registry: "the code")
    numbers = iter(range(100))

    def plan(*given: object, **named: object) -> int:
        print(f"plan {next(numbers)}")
        return 3

    monkeypatch.setattr(command, "_plan", plan)
    words = [*WORDS, f"data_cache_dir={tmp_path}", "--gpu", "h200"]

    def answer(*words: str) -> str:
        assert command.main(words) == 3
        return capsys.readouterr().out

    assert [answer(*words), answer(*words)] == ["plan 0\n", "plan 0\n"]
    others = ([*words, "--json"], [*words, "sequence_len=512"], [*words[:-1], "b200"], [*words, "--busiest", "2"])
    assert [answer(*other) for other in others] == [f"plan {n}\n" for n in (1, 2, 3, 4)]
    # What is free on this machine may be another amount now.
    here = [*words[:-2], "device=cpu"]
    assert [answer(*here), answer(*here), answer(*words)] == ["plan 5\n", "plan 6\n", "plan 0\n"]


@pytest.mark.slow
def test_a_plan_that_was_made_before_needs_no_torch(tmp_path: Path) -> None:
    words = ["plan", *WORDS, f"data_cache_dir={tmp_path}"]
    code = (
        "import sys\nfrom surogate_core.cli.main import main\nassert main(sys.argv[1:]) == 0\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], 'torch._dynamo' in sys.modules, file=sys.stderr)"
    )

    def ran(*more: str) -> tuple[str, str]:
        run = [sys.executable, "-c", code, *words, *more]
        done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout, done.stderr.splitlines()[-1]

    cold, warm = ran("--gpu", "h200"), ran("--gpu", "h200")
    assert warm[0] == cold[0]
    assert (cold[1].split()[-1], warm[1]) == ("True", "[] False")
    # What is free on this machine is read with torch; layers and tokens are counted all the same.
    here = [ran("device=cpu")[1] for _ in range(2)]
    assert here == ["['torch', 'transformers', 'sympy'] True", "['torch'] False"]
