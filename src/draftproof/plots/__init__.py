"""Pictures: figures with matplotlib, curves in the terminal, and the page of a trace."""
