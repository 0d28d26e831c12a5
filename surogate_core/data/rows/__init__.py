"""Rows of files, directories, URLs and the hub, streamed."""
