"""A server with OpenAI's and Anthropic's APIs: `draftproof serve`."""
