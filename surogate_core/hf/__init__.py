"""What is read from and written for Hugging Face: weights, adapters, exports, model cards."""
