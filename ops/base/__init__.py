"""What op families share: shape rules, batching rules, ops on variables, functions of several ops."""
