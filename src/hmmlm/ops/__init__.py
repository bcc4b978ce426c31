"""Numerics as pure functions, one folder an operation.

`naive.py` is the specification, in log space and written to be read; every other implementation must agree with it.
"""
