"""Models and caches: flat files, one idea each, with the attention code and kernels that they stand on.

A file here imports only `configuration` and its neighbours, by relative imports and never through the name nearfar, so
that it can travel inside a checkpoint.
"""
