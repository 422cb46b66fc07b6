"""An OpenAI-compatible server: `draftproof serve`."""
