"""Stand-in for flash-linear-attention (github.com/fla-org/flash-linear-attention, version 0.5.2, commit bc3b101).

Its functions have the library's signatures, layouts and checks, and compute the plain loop in float64 on a CPU.
"""

__version__ = "0.5.2"
