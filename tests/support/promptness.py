"""What counts as at once on a machine that is busy with other things."""

from __future__ import annotations

PROMPT_SECONDS = 6.0
"""Enough for a process to end.

What is waited for in vain, a death that nobody tells or a drain, takes 10 s or more.
"""
