"""Translation validation: a check, independent of the passes, that a folded graph computes what the original does.

After propagation, placements are claims. The certificate takes the normalised original, the graph whose placements are
claimed and the claims (`ir.claims`: plain data), and checks the folded graph after every pass:

    order       every access to a variable is in the original's order, on shards too, and as often (`order`)
    values      each node reads the value of the original, in the claimed placement (`simulate`, `samples`, `kernels`)
    contracts   the claims of results follow from those of operands (`check_claims`, `table`, `run_blocks`)

The certificate trusts neither the pass that inserted a node nor the node's name: it recognises an original node by its
op, attributes and inputs, and any other node by the value that it computes. `Certificate.not_covered` lists what it
could not check.

Only execution can prove the rest (`ar.verify`, `tests/matrix`): loading and normalising the user's program, fetches and
feeds of a session, differing feeds of the workers, TensorFlow's kernels, and the output of expansion.
"""
