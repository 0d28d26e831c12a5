"""Evening out the loads of ranks that share out experts."""
