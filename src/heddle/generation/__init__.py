"""Generation: prefill once, then one token a step with the state; the past is never copied."""
