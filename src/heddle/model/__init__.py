"""The model: the only place that knows there is more than one layer."""
