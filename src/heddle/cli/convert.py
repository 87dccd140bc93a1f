"""`heddle convert`: turn a trained model into one of another design."""

from heddle.conversion.settings import ConvertSettings


def convert(settings: ConvertSettings) -> None:
    """Convert a trained model: fewer key/value heads, latent attention, windows, recurrences and exact rewrites.

    OUT is written whole or not at all; MODEL is only read.
    """
    from heddle.lab.conversion.convert import convert

    convert(settings)
