"""The explorer's data on each part: its fields, its costs as formulas, common mistakes, and models with it."""
