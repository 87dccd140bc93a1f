"""sentence-transformers: an encoder of heddle embeds texts, by the mean of its hidden states, and learns."""

from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer

import heddle
from tests.clients.folders import TEXTS, folder_of, run_client


@torch.no_grad()
def expected(folder: Path, tokens: list[int]) -> torch.Tensor:
    """The mean of the hidden states, by heddle."""
    decoder, _ = heddle.exchange.transformers.load(folder)
    assert not decoder.causal
    return decoder(torch.tensor([tokens]))[0][0].mean(0)


def main(work: Path) -> str:
    """Embed texts of unlike lengths in one batch, save, load, embed again."""
    folder = folder_of("encoder", work, pad=True)
    transformer = Transformer(str(folder))
    model = SentenceTransformer(modules=[transformer, Pooling(48, "mean")], device="cpu")
    texts = [TEXTS[0], "The weaver", "A thread is on the loom"]
    embeddings = model.encode(texts, batch_size=3, convert_to_tensor=True)
    for text, embedding in zip(texts, embeddings, strict=True):
        torch.testing.assert_close(embedding, expected(folder, model.tokenizer(text).input_ids), rtol=0, atol=1e-5)
    model.save_pretrained(str(work / "saved"))
    again = SentenceTransformer(str(work / "saved"), device="cpu").encode(texts, convert_to_tensor=True)
    torch.testing.assert_close(again, embeddings, rtol=0, atol=1e-5)
    return f"{len(texts)} texts of unlike lengths embedded as heddle does, saved and loaded"


if __name__ == "__main__":
    run_client(main, "sentence-transformers")
