"""Rows → tokens → packed shards → batches."""
