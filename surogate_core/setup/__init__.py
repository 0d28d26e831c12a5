"""From a checked configuration to an assembled engine: the model, its task, its weights."""
