"""Plain decoding: prefill once, then one token a step for every row."""

from heddle.generation.prefill import Reader, Request, Steps, evaluating
from heddle.model.decoder import Decoder


def plain(model: Decoder, request: Request, ended: list[bool]) -> Steps:
    """Each step's tokens, one for each row; the caller marks in `ended` the rows that want no more."""
    reader = Reader(model)
    with evaluating(model):
        hidden, state = reader.prompts(request)
        for step in range(request.steps):
            chosen = request.sampling.choose(reader.logits(hidden, request), step)
            yield list(enumerate(chosen.tolist()))
            if all(ended) or step + 1 == request.steps:
                return
            read, state = reader.read(chosen[:, None], None, state)
            hidden = read[:, -1]
