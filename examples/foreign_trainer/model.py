"""A small GPT in plain PyTorch, without heddle. The constants are what a research loop changes."""

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, DEPTH, HEADS, HIDDEN = 64, 2, 4, 256
ACTIVATION = "gelu"
CAUSAL = True
EMBEDDING_STD = 0.02


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=CAUSAL)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        hidden: Tensor = getattr(functional, ACTIVATION)(self.up(self.norms[1](x)))
        return x + self.down(hidden)


class GPT(nn.Module):
    def __init__(self, vocab_size: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(DEPTH)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocab_size, bias=False)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=EMBEDDING_STD)

    def losses(self, rows: Tensor) -> Tensor:
        """rows, int64 [B, T + 1] -> the loss of each token but the first in nats, [B, T]."""
        x = self.tokens(rows[:, :-1]) + self.places.weight[: rows.shape[1] - 1]
        logits = self.head(self.norm(self.blocks(x)))
        losses: Tensor = functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
        return losses


def build(environment: dict[str, str]) -> GPT:
    torch.manual_seed(int(environment["HEDDLE_SEED"]))
    return GPT(int(environment["HEDDLE_VOCAB_SIZE"]), int(environment["HEDDLE_SEQUENCE_LENGTH"]))
