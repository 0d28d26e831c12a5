"""Files and directories: written whole or not at all, private where they must be, local or from the hub."""
