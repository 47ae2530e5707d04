"""Parsers of vendor files and tool output: text in, plain data out, `None` or empty for anything else; none raises."""
