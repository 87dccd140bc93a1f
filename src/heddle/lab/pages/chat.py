"""The page of `heddle chat --page` and of `heddle serve`: talk to a model, or to two side by side."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from heddle.lab.pages.render import render


@dataclass(frozen=True)
class ServedModel:
    """A model that a server answers for.

    address: the prefix of its URLs, "" for the server's own. is_chat: whether it has a chat template.
    has_scores: whether answers come with the probabilities of their tokens.
    """

    name: str
    address: str
    parameters: int
    is_chat: bool
    has_scores: bool
    vocab_size: int


def chat_page(models: Sequence[ServedModel], most_tokens: int) -> str:
    """The page as one HTML document. most_tokens: the limit of an answer."""
    return render(
        "chat.html",
        title=f"heddle chat: {' and '.join(model.name for model in models)}",
        models=models,
        most_tokens=most_tokens,
        smallest_vocabulary=min(model.vocab_size for model in models),
        data=[asdict(model) for model in models],
    )
