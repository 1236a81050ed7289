"""Rules of how one node is split, and the choice of the mesh axes that it is split along."""
