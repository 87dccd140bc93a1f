"""Autoregressive decoding: prefill, then one forward pass per new token of every row."""

from heddle.generation.model_runner import GenerationRequest, ModelRunner, NewTokens, eval_mode
from heddle.generation.prefill import prefill
from heddle.model.decoder import Decoder


def decode(model: Decoder, request: GenerationRequest, finished: list[bool]) -> NewTokens:
    """Yield one new token per row at each step. The caller marks rows in `finished` when they need no more tokens."""
    runner = ModelRunner(model)
    with eval_mode(model):
        hidden, state = prefill(runner, request)
        for step in range(request.max_new_tokens):
            tokens = request.sampler.sample(runner.logits(hidden, request), step)
            yield list(enumerate(tokens.tolist()))
            if all(finished) or step + 1 == request.max_new_tokens:
                return
            all_hidden, state = runner.forward(tokens[:, None], None, state)
            hidden = all_hidden[:, -1]
