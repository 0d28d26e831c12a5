"""From a YAML file and the command line to one mapping, composed by Hydra."""
