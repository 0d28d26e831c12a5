"""Opens trained models for generation: weights, tokenizer, texts in and out."""
