"""Surogate plugin: conversation and text data sets, and the embedded example."""
