"""Groups of query heads that share keys and values, and how the heads of a group become one."""
