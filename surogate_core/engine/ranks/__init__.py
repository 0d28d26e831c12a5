"""What the ranks of one run share: owned parts of weights, gradients and states, and their reductions."""
