"""Looking at graphs: text, tables, pictures, differences."""
