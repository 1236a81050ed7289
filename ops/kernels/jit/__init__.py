"""Compile LLVM IR, keep object code on disk, run tables of native calls on threads."""
