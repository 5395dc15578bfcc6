"""Triangle multiplicative update: operand layout, float64 reference, inputs and workloads.

The modules need torch; this one does not, as the registry imports it.
"""
