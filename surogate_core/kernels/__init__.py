"""The op registry, and the plain-PyTorch reference of every op (CPU path and oracle)."""
