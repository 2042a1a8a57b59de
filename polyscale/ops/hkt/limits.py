"""What the fused kernels of HKT attention, native and Triton, are written for."""

MAX_LEVELS = 5  # the native kernel is compiled with this number
MAX_WIDTH = 256  # of a head's queries and keys, and of its values
