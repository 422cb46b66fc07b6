"""What is asked of an engine: prompts, sampling options, requests and their completions."""
