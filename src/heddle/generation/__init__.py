"""Generation: prefill, decoding, sampling, speculative decoding and beam search."""
