"""Folders of tensors and text: written crash-safely, verified on every read, never executed."""
