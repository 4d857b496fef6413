"""What a simulation runs on: tensors that know their shape and hold no bytes.

From the ground up: `unknown` (a number that a simulation does not have), `as_computed` (where shape functions err),
`fake` (the mode, and a step of such tensors), `faking` (the mode switched on, and what is different meanwhile),
`as_cuda` (what CUDA saves for backward). `simulate.py` makes a `Trace` with them.
"""
