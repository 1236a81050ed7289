"""The intermediate representation: tensor specs, ops, nodes, graphs and the op registry."""
