"""Hugging Face config.json and tensor names, read and written."""
