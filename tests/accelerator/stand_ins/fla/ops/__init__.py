"""Stand-ins for the operations of flash-linear-attention 0.5.2. The loops are in `loops`."""
