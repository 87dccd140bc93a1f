"""Text to tokens: sources, tokenizer, token files, and the order in which samples are drawn."""
