"""The model servers behind the routes: one small interface, and what speaks each server's API."""

from __future__ import annotations

from config import Settings
from execution.backends.interface import Backend
from execution.backends.ollama import OllamaBackend
from execution.backends.openai import OpenAIBackend


def backend_of(settings: Settings, route: str) -> Backend:
    """What serves `route`; ConfigError if its key is to be in a variable that is not set."""
    if settings.backends.of_route(route).api == "openai":
        return OpenAIBackend(settings, route)
    return OllamaBackend(settings, route)
