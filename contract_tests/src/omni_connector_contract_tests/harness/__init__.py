"""Runs producers and consumers in processes of their own and watches what they leave behind."""
