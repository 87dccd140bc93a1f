"""Random defects of a file: the kinds that disks, copies and hands make."""

import random
from pathlib import Path


def damaged(raw: bytes, draw: random.Random) -> bytes:
    """One random defect of the kinds that disks, copies and hands make."""
    offset = draw.randrange(len(raw))
    match draw.choice(["bit", "swap", "page", "cut", "append", "byte", "move"]):
        case "bit":
            return raw[:offset] + bytes([raw[offset] ^ 1 << draw.randrange(8)]) + raw[offset + 1 :]
        case "swap":
            other = draw.randrange(len(raw))
            changed = bytearray(raw)
            changed[offset], changed[other] = raw[other], raw[offset]
            return bytes(changed)
        case "page":
            start = offset // 4096 * 4096
            return raw[:start] + bytes(len(raw[start : start + 4096])) + raw[start + 4096 :]
        case "cut":
            return raw[:offset]
        case "append":
            return raw + draw.randbytes(draw.randrange(1, 20))
        case "byte":
            return raw[:offset] + draw.randbytes(1) + raw[offset + 1 :]
        case _:
            return raw[offset:] + raw[:offset]


def overwrite(path: Path, raw: bytes, size: int) -> None:
    """Put `raw` where `size` bytes were; cutting a file to nothing first would cost a disk far more."""
    with open(path, "r+b") as file:
        file.write(raw)
        if len(raw) < size:
            file.truncate()
