"""Numerics as pure functions, one folder per operation.

Specifications, written for readability, are in the tests; every implementation must agree with them.
"""
