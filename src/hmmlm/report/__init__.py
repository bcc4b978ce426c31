"""Reports on finished runs: the HTML page, its plots, terminal tables and explanations of states."""
