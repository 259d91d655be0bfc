"""Prompts to completions, and completions to what the roles say about them."""
