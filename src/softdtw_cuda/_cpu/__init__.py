"""CPU backend: Numba kernels on SIMD vectors, their launcher, and the sizes of what they save."""
