"""The nouns of the project: small frozen dataclasses that travel between the storeys."""
