"""Translation validation: a check, independent of the passes, that a folded graph computes what the original does.

From propagation on, placements are claims. The certificate takes the normalised original, the graph that placements
are claimed of and the claims (`ir.claims`: plain data), and checks the folded graph after every pass:

    order       every access to a variable in the original's order, on shards too, and as often (`order`)
    values      each node reads what it should, in the placement that it should (`simulate`, `samples`, `kernels`)
    contracts   what a node makes of blocks and contributions is what is claimed (`check_claims`, `table`, `run_blocks`)

Nothing here trusts who inserted a node, or its name: an original node is recognised by its op, attributes and inputs,
everything else by what it computes. Where it cannot check something it says so (`Certificate.not_covered`).

What it cannot see is proved by execution (`ar.verify`, `tests/matrix`): loading and normalising the user's program,
what a session fetches and feeds, differing feeds of the workers, TensorFlow's kernels, and what expansion writes.
"""
