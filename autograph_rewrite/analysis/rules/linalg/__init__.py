"""Rules of linear algebra: contractions, reductions, decompositions, and what couples all examples."""
