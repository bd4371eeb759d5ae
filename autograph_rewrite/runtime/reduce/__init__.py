"""A minimal graph whose rewrite is still wrong, by delta debugging."""
