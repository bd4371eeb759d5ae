"""Rules of state: variables, tables, tensor arrays and lists, side effects."""
