"""What the explorer shows of each part: its fields, its costs as formulas, its mistakes, the models that use it."""
