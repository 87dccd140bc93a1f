"""Floor 2: the parts. One folder a slot, one file a kind; a file holds a config and the module it builds."""
