"""From one format of a trained model to another: merging adapters, files for other programs."""
