"""Show graphs and rewrites: text, tables, pictures, differences, reports, profiles."""
