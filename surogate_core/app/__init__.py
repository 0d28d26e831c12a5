"""What the command line and Python share: arguments, and starting a run of a composed configuration."""
