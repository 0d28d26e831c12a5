import math

from surogate_core.outcome import verdict


def test_what_is_said_about_a_run_that_got_worse():
    never = "No step was better than the start: the eval loss was 2.0000 before the first step."
    assert verdict("eval loss", 2.0, 3.0, 2.0, 0) == never
    assert verdict("eval loss", 2.0, 2.0, 2.0, 0) == never, "it did not change"
    assert verdict("eval loss", 2.0, 3.0, 2.5, 4) == never, "a checkpoint that does not count step 0"
    assert verdict("eval loss", 2.0, 3.0, None, None) == never
    ended = "The last step is worse than the start: the eval loss was 2.0000 before the first step and 1.5000 at step 4"
    assert verdict("eval loss", 2.0, 3.0, 1.5, 4) == f"{ended}, the best."
    assert verdict("eval loss", 2.0, math.nan, 1.5, 4) == f"{ended}, the best."
    assert verdict("held-out reward", 0.5, 0.25, 0.5, 0, higher=True).startswith("No step was better than the start")
    assert verdict("held-out reward", 0.5, 0.25, 0.75, 3, higher=True).startswith("The last step is worse")


def test_nothing_is_said_about_a_run_that_got_better_or_was_not_measured_twice():
    assert verdict("eval loss", 2.0, 1.5, 1.25, 4) == ""
    assert verdict("eval loss", 2.0, 1.5, None, None) == ""
    assert verdict("held-out reward", 0.5, 0.75, 0.75, 3, higher=True) == ""
    assert verdict("eval loss", 2.0, None, 2.0, 0) == ""
    assert verdict("eval loss", None, None, None, None) == ""
