"""Hugging Face formats, read and written: weights, adapters, exports, model cards."""
