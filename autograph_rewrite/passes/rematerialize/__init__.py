"""Rematerialisation: activations are recomputed in the backward pass instead of being kept from the forward pass.

    before   x ─► [ a ─► b ─► c ] ─► d ...              a, b and c are kept until their gradients have been made
    after    x ─► [ a ─► b ─► c ] ─► d ...              x alone is kept
             x ─► [ a' ─► b' ─► c' ] ─► gradients       ^dd: not before the gradient that comes to c is there

It works on the backward that is in the graph. `activations` says what may be computed again and who reads it,
`policies` which of it is (`cuts` where a chain is cut), `decide` makes segments of that, `triggers` what a segment
waits for, and `rewrite` puts the copies in.
"""
