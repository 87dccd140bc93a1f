"""A stream of proposals, each compared with the incumbent, with a bounded false discovery rate."""
