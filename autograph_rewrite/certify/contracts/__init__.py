"""Contracts: which claims of split, partial and local sizes are valid for an op; every claim is checked against one.

    x: split(0)   w: replicated   ──MatMul "@mk,@kn->@mn|k"──►   split(0)      m is cut, and the result has it
    x: split(1)   w: split(0)     ──MatMul "@mk,@kn->@mn|k"──►   partial(sum)  k is cut, and summed over
    x: split(1)   w: replicated   ──MatMul──►                    refused: input 1 has k, and is whole

Nothing here derives a placement or chooses one: it says whether one that is claimed is right. The table is written
from TensorFlow's documentation, not from the rules of propagation, and tested on real kernels
(tests/certify/test_contracts.py).

    seen       what a node is claimed to read and to make
    factors    dimensions that belong together, and the verdict over a node that has them
    patterns   factors as text; `table` has them by op
    moves      factors that follow from operands and attributes: reshapes, slices, gathers, reductions
    sizes      integers that count examples: evaluated with numbers in the place of symbols
    containers tensor arrays and stacks: what is read is what was written
    check      all nodes of a graph
"""
