"""From scalar expressions and loops to LLVM IR."""
