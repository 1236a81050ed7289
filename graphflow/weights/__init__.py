"""Weights of models: in sessions, in safetensors files, by torch's names; and a table of layers.

    a model's attributes ─weight_names→ names ─weight_matching→ values for variables
    files of safetensors ─weight_files→ arrays, read where they are needed

Users call these as `model.state`, `model.load`, `model.save` and `model.summary`.
"""
