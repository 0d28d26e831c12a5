"""Files and directories: written completely or not at all, private if necessary, local or from the hub."""
