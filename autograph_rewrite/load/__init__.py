"""Everything that becomes a GraphItem: graphs, files, functions, Keras models; and its normal form."""
