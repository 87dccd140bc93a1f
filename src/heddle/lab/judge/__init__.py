"""A stream of proposals, each compared with the incumbent; the false discovery rate of the stream is bounded."""
