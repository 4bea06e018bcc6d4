"""CUDA kernels: sources in `kernels/`, choices in `config`, NVRTC in `compile`, tensors in `launch`."""
