"""The KV-cache server that every LLM inference engine on a machine shares."""

__version__ = "0.1.0"
