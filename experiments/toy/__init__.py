"""The embedded checkpoints: their language, tokenizer, training, measurements and model cards."""
