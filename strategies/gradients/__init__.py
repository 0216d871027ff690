"""How gradients are sent: summed over replicas, rounded to 16 bits, many small ones together.

`all_reduce.py` sums gradients over all replicas. `compression.py` rounds them with error feedback.
`coalescing.py` sends small tensors together, because each transfer has a fixed cost. Read
`all_reduce.py` first.
"""
