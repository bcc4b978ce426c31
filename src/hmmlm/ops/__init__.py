"""Numerics as pure functions, one folder per operation.

`naive.py` is the specification, written for readability; inference operations compute it in log space. Every other
implementation must agree with it.
"""
