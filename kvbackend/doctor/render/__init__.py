"""Say a report: on a screen, in one line per finding, as markdown, as a script, or one thing explained."""
