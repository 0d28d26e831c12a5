"""Tools that models call: the forms of calls, and the calls in completions. See docs/howto/tools.md."""
