"""The `autograph-rewrite` command: one module per verb (installed as `autograph_rewrite.tools`)."""
