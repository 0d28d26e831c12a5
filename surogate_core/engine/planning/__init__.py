"""What is known of a run before a tensor is allocated: its parts, how weights are stored, the bytes of memory."""
