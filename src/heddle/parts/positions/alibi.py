"""ALiBi (Press et al. 2021): `slope_h · (i − j)` is subtracted from the score of query i and key j.

Slopes are fixed to `2^(−8h/heads)` for query heads h = 1 … heads. A bidirectional mixer uses the distance `|i − j|`.
"""

from heddle.parts.positions import ScoreBias, ScoreBiasConfig


class AlibiConfig(ScoreBiasConfig):
    """No fields."""

    def build(self, heads: int) -> "ScoreBias":
        """Build the module."""
        return ScoreBias(tuple(2.0 ** (-8.0 * head / heads) for head in range(1, heads + 1)))
