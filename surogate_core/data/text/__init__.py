"""Text and conversations → tokens and which of them are trained: tokenizer, chat template, labels."""
