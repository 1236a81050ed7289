"""The GPU backend: memory and streams through CuPy, CUDA graphs, cuBLAS products."""
