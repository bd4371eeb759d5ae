"""Renders graphs and tables: text, Graphviz, web page, data for other tools."""
