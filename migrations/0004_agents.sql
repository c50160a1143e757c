-- Version 4: agent jobs (what they ask of people, their ledger, their checkpoints), names that are free
-- again once their task has ended, and callbacks.

ALTER TABLE tasks
    ADD COLUMN callback_url text,
    ADD COLUMN gate jsonb,
    ADD CONSTRAINT only_a_job_has_a_gate CHECK (gate IS NULL OR kind = 'agent'),
    ADD CONSTRAINT parked_job_asks_something CHECK (
        status <> 'AWAITING_APPROVAL' OR kind <> 'agent' OR gate IS NOT NULL),
    ADD CONSTRAINT nobody_is_told_of_a_callback CHECK (callback_url IS NULL OR kind <> 'callback');

CREATE UNIQUE INDEX tasks_by_live_name ON tasks (tenant, name)
    WHERE name IS NOT NULL
      AND status IN ('BLOCKED', 'PENDING', 'RUNNING', 'AWAITING_APPROVAL');

CREATE TABLE model_calls (
    call_id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task_id           bigint      NOT NULL,
    node              text        NOT NULL,
    node_run          text        NOT NULL,
    ordinal           integer     NOT NULL,
    reserved_tokens   bigint      NOT NULL,
    reserved_at       timestamptz NOT NULL DEFAULT current_instant(),
    ended_at          timestamptz,
    prompt_tokens     bigint,
    completion_tokens bigint,
    cost              numeric,
    route             text,
    model             text,
    reply             text,
    CONSTRAINT call_uses_no_less_than_nothing CHECK (
        reserved_tokens >= 0 AND prompt_tokens >= 0 AND completion_tokens >= 0 AND cost >= 0),
    CONSTRAINT ended_call_has_its_tokens CHECK (
        (ended_at IS NULL) = (prompt_tokens IS NULL)
        AND (ended_at IS NULL) = (completion_tokens IS NULL)),
    CONSTRAINT only_an_ended_call_has_a_reply CHECK (reply IS NULL OR ended_at IS NOT NULL)
);
COMMENT ON TABLE model_calls IS 'One row for each model call of an agent job.';
CREATE INDEX model_calls_by_task ON model_calls (task_id, call_id);
CREATE UNIQUE INDEX model_calls_replied ON model_calls (task_id, node_run, ordinal)
    WHERE reply IS NOT NULL;

CREATE TABLE tenant_tokens (
    tenant text   NOT NULL,
    day    date   NOT NULL,
    taken  bigint NOT NULL,
    PRIMARY KEY (tenant, day)
);
COMMENT ON TABLE tenant_tokens IS 'Tokens of each tenant''s agent jobs, by day.';

CREATE TABLE job_states (
    task_id           bigint      NOT NULL,
    checkpoint_id     text        NOT NULL,
    at                timestamptz NOT NULL DEFAULT current_instant(),
    attempt           bigint      NOT NULL,
    nodes             text[]      NOT NULL,
    next_nodes        text[]      NOT NULL,
    graph_version     text        NOT NULL,
    state             jsonb       NOT NULL,
    prompt_tokens     bigint      NOT NULL,
    completion_tokens bigint      NOT NULL,
    PRIMARY KEY (task_id, checkpoint_id)
);
COMMENT ON TABLE job_states IS 'One row for each checkpoint of an agent job.';

CREATE FUNCTION hold_lease(held_task bigint, held_token uuid) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM tasks
    WHERE task_id = held_task AND lease_token = held_token AND status = 'RUNNING'
    FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the lease of task % is gone', held_task USING ERRCODE = 'LL001';
    END IF;
END $$;

CREATE TABLE checkpoint_migrations (
    v integer PRIMARY KEY
);
INSERT INTO checkpoint_migrations (v) SELECT generate_series(0, 9);

CREATE TABLE checkpoints (
    thread_id            text  NOT NULL,
    checkpoint_ns        text  NOT NULL DEFAULT '',
    checkpoint_id        text  NOT NULL,
    parent_checkpoint_id text,
    type                 text,
    checkpoint           jsonb NOT NULL,
    metadata             jsonb NOT NULL DEFAULT '{}',
    PRIMARY KEY (thread_id, checkpoint_ns, checkpoint_id)
);
CREATE INDEX checkpoints_thread_id_idx ON checkpoints (thread_id);

CREATE TABLE checkpoint_blobs (
    thread_id     text  NOT NULL,
    checkpoint_ns text  NOT NULL DEFAULT '',
    channel       text  NOT NULL,
    version       text  NOT NULL,
    type          text  NOT NULL,
    blob          bytea,
    PRIMARY KEY (thread_id, checkpoint_ns, channel, version)
);
CREATE INDEX checkpoint_blobs_thread_id_idx ON checkpoint_blobs (thread_id);

CREATE TABLE checkpoint_writes (
    thread_id     text    NOT NULL,
    checkpoint_ns text    NOT NULL DEFAULT '',
    checkpoint_id text    NOT NULL,
    task_id       text    NOT NULL,
    idx           integer NOT NULL,
    channel       text    NOT NULL,
    type          text,
    blob          bytea   NOT NULL,
    task_path     text    NOT NULL DEFAULT '',
    PRIMARY KEY (thread_id, checkpoint_ns, checkpoint_id, task_id, idx)
);
CREATE INDEX checkpoint_writes_thread_id_idx ON checkpoint_writes (thread_id);

CREATE TABLE webhook_secrets (
    tenant     text        PRIMARY KEY,
    secret     bytea       NOT NULL,
    created_at timestamptz NOT NULL DEFAULT current_instant(),
    CONSTRAINT secret_tenant_is_a_name CHECK (tenant ~ '^[A-Za-z0-9_-]{1,64}$'),
    CONSTRAINT secret_is_long CHECK (octet_length(secret) BETWEEN 24 AND 64)
);
COMMENT ON TABLE webhook_secrets IS 'One row for each tenant whose callbacks are signed.';

CREATE FUNCTION prompt_length(payload jsonb) RETURNS integer LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(char_length(coalesce(payload ->> 'prompt', payload ->> 'task')), 0);

CREATE OR REPLACE FUNCTION transition_detail(task tasks) RETURNS jsonb LANGUAGE sql STABLE
RETURN CASE
    WHEN task.reason IN ('retry', 'outage') THEN jsonb_build_object(
        'error', task.last_error,
        'delay_seconds',
        round(extract(epoch FROM task.available_at - task.updated_at)::numeric, 3))
    WHEN task.status = 'FAILED' AND task.kind <> 'run' THEN
        jsonb_build_object('error', task.last_error)
    ELSE '{}'::jsonb
END || CASE
    WHEN nullif(current_setting('orchestrator.acts_for', true), '') IS NOT NULL
    THEN jsonb_build_object('by', current_setting('orchestrator.acts_for', true))
    ELSE '{}'::jsonb
END || CASE
    WHEN task.reason IN ('parked', 'approved', 'rejected') THEN jsonb_strip_nulls(jsonb_build_object(
        'feedback', coalesce(task.result, task.gate -> 'decision') -> 'feedback',
        'artefact', task.gate -> 'artefact'))
    ELSE '{}'::jsonb
END;

CREATE OR REPLACE FUNCTION audit_changed_tasks() RETURNS trigger LANGUAGE plpgsql
SET enable_nestloop = off AS $$
DECLARE
    illegal record;
    changed bigint[];
BEGIN
    -- A heartbeat, or an update of no row, changes no state and stops here.
    SELECT array_agg(n.task_id ORDER BY n.task_id) INTO changed
    FROM new_tasks n JOIN old_tasks o USING (task_id)
    WHERE n.status <> o.status OR n.reason <> o.reason
       OR n.lease_token IS DISTINCT FROM o.lease_token OR n.due AND NOT o.due;
    IF changed IS NULL THEN
        RETURN NULL;
    END IF;

    SELECT n.task_id, o.status AS old_status, n.status AS new_status, n.reason INTO illegal
    FROM new_tasks n JOIN old_tasks o USING (task_id)
    WHERE (n.status <> o.status OR n.reason <> o.reason
           OR n.lease_token IS DISTINCT FROM o.lease_token)
      AND NOT EXISTS (
        SELECT FROM transitions t
        WHERE t.from_status = o.status AND t.to_status = n.status AND t.reason = n.reason)
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'task % cannot go from % to % (%)',
            illegal.task_id, illegal.old_status, illegal.new_status, illegal.reason
            USING ERRCODE = 'check_violation', CONSTRAINT = 'transitions';
    END IF;

    WITH logged AS (
        INSERT INTO audit_log (
            root_id, task_id, run_id, step, tenant, from_status, to_status, reason,
            worker, attempt, detail)
        SELECT coalesce(n.parent_id, n.task_id), n.task_id,
               CASE n.kind WHEN 'run' THEN n.task_id ELSE n.parent_id END,
               n.step, n.tenant, o.status, n.status, n.reason,
               n.worker, n.attempt, transition_detail(n.*::tasks)
        FROM new_tasks n JOIN old_tasks o USING (task_id)
        WHERE n.status <> o.status
        ORDER BY n.task_id
        RETURNING task_id, run_id
    )
    SELECT array_agg(DISTINCT id) INTO changed
    FROM (SELECT task_id FROM logged UNION SELECT run_id FROM logged) AS told(id)
    WHERE id IS NOT NULL;
    PERFORM notify_listeners(
        EXISTS (
            SELECT FROM new_tasks n JOIN old_tasks o USING (task_id)
            WHERE n.due AND NOT o.due),
        changed);

    -- Whoever asked to be told of an end is told by a task, born in the transaction of that end.
    IF EXISTS (SELECT FROM new_tasks WHERE callback_url IS NOT NULL AND finished_at IS NOT NULL) THEN
        INSERT INTO tasks (tenant, kind, payload, priority, requested_route)
        SELECT n.tenant, 'callback',
               jsonb_build_object('task_id', n.task_id, 'url', n.callback_url), n.priority, 'none'
        FROM new_tasks n JOIN old_tasks o USING (task_id)
        WHERE n.callback_url IS NOT NULL AND n.finished_at IS NOT NULL AND o.finished_at IS NULL
        ORDER BY n.task_id;
    END IF;
    RETURN NULL;
END $$;
