"""What happens to a request, one file a call: it begins and ends, grows, shares a prefix, leaves for host memory.

`copier`, `zeroing` and `row_mover` move the bytes that these calls must move.
"""
