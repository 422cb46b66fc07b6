"""An engine's input and output: prompts, sampling options, requests and completions."""
