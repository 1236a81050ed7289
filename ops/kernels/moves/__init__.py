"""Native kernels that move elements: gathers, strided copies, joins; and positions of extrema."""
