"""`heddle convert`: convert a trained model to another design."""

from heddle.conversion.settings import ConvertSettings, check_options


def convert(settings: ConvertSettings) -> None:
    """Convert a trained model: fewer key/value heads, latent attention, windows, recurrences and exact rewrites.

    OUT is written atomically; MODEL is not changed.
    """
    if not settings.list_:
        check_options(settings)  # before torch is imported
    from heddle.lab.conversion.convert import convert

    convert(settings)
