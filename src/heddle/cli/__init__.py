"""Floor 5: the command line, one file a verb."""
