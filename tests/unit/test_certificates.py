"""Whose certificates a client of a model server believes."""

from __future__ import annotations

import ssl

from execution.certificates import trusted, trusted_by


def test_a_server_with_https_is_checked_by_the_certificates_that_all_share() -> None:
    context = trusted_by("https://api.example.com")
    assert context is trusted()
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.cert_store_stats()["x509_ca"] > 0


def test_a_server_without_https_is_called_by_a_client_that_would_believe_nobody() -> None:
    context = trusted_by("http://localhost:11434")
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.cert_store_stats()["x509_ca"] == 0
