"""Abstract execution on sample data: what reshards and loops of a rewrite produce, computed in numpy."""
