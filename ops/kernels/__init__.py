"""What kernels are made of: the threads they share."""
