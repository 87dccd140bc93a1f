"""A short text of a model's own, to see at the end of a training what it has learned."""

from heddle.generation.generate import Tokenizer, generate
from heddle.model.decoder import Decoder

LONGEST = 96


def sample(model: Decoder, tokenizer: Tokenizer, context: int) -> str:
    """What the model writes from nothing: at most 96 tokens, and never more than the `context` it was trained on."""
    steps = min(LONGEST, context)
    return generate(model, [""], tokenizer, max_new_tokens=steps, temperature=0.8, top_p=0.95)[0]
