"""CUDA kernels: sources in `kernels/`, launch choices in `config`, NVRTC in `compile`, tensors in `launch`."""
