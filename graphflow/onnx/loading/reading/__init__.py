"""Read ONNX files that nobody vouches for: bytes to checked protos and arrays."""
