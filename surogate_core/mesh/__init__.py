"""The ranks of a run: who they are, how they talk, and sums over them that do not depend on their number."""
