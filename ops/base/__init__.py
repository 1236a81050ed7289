"""What op families share: rules of shapes and batches, ops on variables, composites of ops."""
