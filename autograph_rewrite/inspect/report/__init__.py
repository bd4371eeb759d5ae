"""`report`: one offline HTML file that shows a graph, what each pass made of it, and what a step costs."""
