"""Generation: the blocks of a model with a cache of keys and values in static slots."""
