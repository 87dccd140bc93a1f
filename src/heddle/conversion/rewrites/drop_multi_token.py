"""Remove the multi-token modules, which only training and speculative decoding use."""

from typing import ClassVar

from heddle.config import DesignError
from heddle.conversion.rewrite import EVERYTHING, Rewrite
from heddle.conversion.weights import CalibrationText, ConvertedWeights, Weights


class DropMultiToken(Rewrite):
    """Remove the multi-token modules."""

    keeps: ClassVar[frozenset[str]] = EVERYTHING
    exact: ClassVar[bool] = True

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError for a design without modules."""
        self.refuse_layers("multi_token")
        if source.design.multi_token is None:
            raise DesignError("multi_token", "the design has no modules to drop, so nothing would change; leave it out")
        return ConvertedWeights(source, source.design.replace(multi_token=None))
