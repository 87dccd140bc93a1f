"""Remove the multi-token modules, which only training and drafting use."""

from typing import ClassVar

from heddle.config import DesignError
from heddle.conversion.rewrite import Rewrite
from heddle.conversion.weights import CalibrationText, ConvertedWeights, Weights
from heddle.model.config import ModelConfig


class DropMultiToken(Rewrite):
    """Remove the multi-token modules."""

    keeps_attention: ClassVar[bool] = True
    keeps_layers: ClassVar[bool] = True
    keeps_convolutions: ClassVar[bool] = True
    keeps_modules: ClassVar[bool] = True

    def is_exact(self, design: ModelConfig) -> bool:
        """Always."""
        return True

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError for a design without modules."""
        self.refuse_layers("multi_token")
        if source.design.multi_token is None:
            raise DesignError("multi_token", "the design has no modules to drop, so nothing would change; leave it out")
        return ConvertedWeights(source, source.design.replace(multi_token=None))
