"""CPU backend: Numba kernels on SIMD vectors (:mod:`.kernels`), their launcher and the sizes of what they save."""
