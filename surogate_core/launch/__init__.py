"""`launcher=local`: the processes of a run on this machine, and the supervisor that watches them."""
