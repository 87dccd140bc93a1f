"""Random layouts as tensors: documents from any first position, with padding anywhere. Every one is valid."""

import random

import torch

from heddle.parts.layout import Layout


def random_row(generator: random.Random, length: int) -> tuple[list[int], list[int]]:
    """Positions and segment ids of a row of `length` columns; the ids of padding mean nothing."""
    positions, segment_ids = [], []
    padding = generator.choice((0.0, 0.0, 0.2, 0.6))  # the share of padding between tokens
    new_document = generator.choice((0.0, 0.1, 0.4))
    left, right = ((generator.randrange(length + 1) if generator.random() < 0.3 else 0) for _ in range(2))
    position, segment = generator.choice((0, 0, 0, 1, 900)), generator.choice((0, 0, 3))
    for column in range(length):
        if column < left or column >= length - right or generator.random() < padding:
            positions.append(-1)
            segment_ids.append(generator.randrange(9))
            continue
        if column and generator.random() < new_document:
            position, segment = generator.choice((0, 0, 0, 5)), segment + generator.choice((1, 1, 4))
        positions.append(position)
        segment_ids.append(segment)
        position += 1
    return positions, segment_ids


def random_tensors(generator: random.Random, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Positions and segment ids int64 [rows, length] of a valid layout; no segment ids if no row needs them."""
    drawn = [random_row(generator, length) for _ in range(rows)]
    positions, segment_ids = (torch.tensor([row[field] for row in drawn], dtype=torch.int64) for field in range(2))
    token_ids = [{s for p, s in zip(*row, strict=True) if p >= 0} for row in drawn]
    needs_ids = any(len(ids) > 1 for ids in token_ids) or generator.random() < 0.3
    return positions, segment_ids if needs_ids else None


def random_layout(generator: random.Random, rows: int, length: int) -> Layout:
    """A random valid layout of `rows` rows and `length` columns, made from tensors."""
    return Layout.of(*random_tensors(generator, rows, length))
