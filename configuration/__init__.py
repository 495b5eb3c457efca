"""Configurations: the typed, validated settings of each model here, and what makes a saved checkpoint self-contained.

Nothing in this folder imports another part of nearfar; every other part may import it.
"""
