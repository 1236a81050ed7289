"""State of the whole process: interrupts, BLAS threads, garbage collection, modules, files."""
