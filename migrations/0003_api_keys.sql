-- Version 3: API keys, tickets for streams that cannot send one, and what a tenant may ask for.

CREATE TABLE api_keys (
    key_id      text        PRIMARY KEY,
    secret_hash bytea       NOT NULL,
    tenant      text,
    is_operator boolean     NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT current_instant(),
    revoked_at  timestamptz,
    CONSTRAINT key_tenant_is_a_name CHECK (tenant ~ '^[A-Za-z0-9_-]{1,64}$'),
    CONSTRAINT key_is_a_tenants_or_an_operators CHECK (is_operator = (tenant IS NULL)),
    CONSTRAINT key_is_stored_as_its_hash CHECK (octet_length(secret_hash) = 32)
);
COMMENT ON TABLE api_keys IS 'One row for each API key that was ever created.';

CREATE TABLE tickets (
    ticket_hash bytea       PRIMARY KEY,
    key_id      text        NOT NULL,
    path        text        NOT NULL,
    expires_at  timestamptz NOT NULL
);
COMMENT ON TABLE tickets IS 'Tickets for live events; those that have expired go with the next.';

CREATE INDEX tickets_by_expiry ON tickets (expires_at);

CREATE TABLE tenant_requests (
    tenant text        PRIMARY KEY,
    minute timestamptz NOT NULL,
    taken  bigint      NOT NULL
);
COMMENT ON TABLE tenant_requests IS 'What limits.tenant_requests_per_minute has to know.';
