"""The parts: one folder per slot, one file per kind. A file holds a config and the module it builds."""
