"""Families, a file for those of one lineage: each `Family` has functions between the two configs and maps weights.

A family alone in its file is described by the file's docstring, one that shares it by that of its `read_config`.
"""
