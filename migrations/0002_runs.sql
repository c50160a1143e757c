-- Version 2: runs. A step waits in its own row for what it depends on (unmet, step_edges); the audit
-- of a run is found by its number; transitions that a person made say who it was.

ALTER TABLE tasks
    ADD COLUMN unmet integer NOT NULL DEFAULT 0,
    ADD COLUMN result_bytes bigint,
    DROP CONSTRAINT only_running_is_asked_to_cancel,
    ADD CONSTRAINT only_running_is_asked_to_cancel CHECK (
        NOT cancel_requested OR status IN ('RUNNING', 'CANCELLED')
        OR status = 'BLOCKED' AND kind = 'run'),
    ADD CONSTRAINT only_a_step_depends CHECK (unmet >= 0 AND (unmet = 0 OR parent_id IS NOT NULL)),
    ADD CONSTRAINT nothing_unmet_has_begun CHECK (
        unmet = 0 OR status IN ('BLOCKED', 'CANCELLED')),
    ADD CONSTRAINT blocked_waits_for_something CHECK (
        status <> 'BLOCKED' OR unmet > 0 OR kind = 'run'),
    ADD CONSTRAINT run_only_waits_and_ends CHECK (
        kind <> 'run' OR status IN ('BLOCKED', 'SUCCEEDED', 'FAILED', 'CANCELLED')),
    ADD CONSTRAINT run_is_no_step CHECK (kind <> 'run' OR parent_id IS NULL),
    ADD CONSTRAINT nobody_works_on_an_approval CHECK (
        kind <> 'approval' OR status NOT IN ('PENDING', 'RUNNING'));

CREATE INDEX tasks_unended_steps ON tasks (parent_id)
    WHERE parent_id IS NOT NULL AND status IN ('BLOCKED', 'PENDING', 'RUNNING', 'AWAITING_APPROVAL');

CREATE TABLE step_edges (
    task_id bigint NOT NULL,
    needs   bigint NOT NULL,
    PRIMARY KEY (task_id, needs),
    CONSTRAINT parents_have_lower_numbers CHECK (needs < task_id)
);
COMMENT ON TABLE step_edges IS 'Which step of a run depends on which.';
CREATE INDEX step_edges_by_need ON step_edges (needs, task_id);

CREATE INDEX audit_log_by_run ON audit_log (run_id, id) WHERE run_id IS NOT NULL;

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
    WHEN task.reason IN ('approved', 'rejected') AND task.result ->> 'feedback' IS NOT NULL
    THEN jsonb_build_object('feedback', task.result -> 'feedback')
    ELSE '{}'::jsonb
END;

CREATE OR REPLACE FUNCTION audit_created_tasks() RETURNS trigger LANGUAGE plpgsql
SET enable_nestloop = off AS $$
DECLARE
    illegal record;
BEGIN
    SELECT n.task_id, n.status, n.reason INTO illegal
    FROM new_tasks n
    WHERE NOT EXISTS (
        SELECT FROM transitions t
        WHERE t.from_status IS NULL AND t.to_status = n.status AND t.reason = n.reason)
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'a task cannot be created as % (%)', illegal.status, illegal.reason
            USING ERRCODE = 'check_violation', CONSTRAINT = 'transitions';
    END IF;
    INSERT INTO audit_log (
        root_id, task_id, run_id, step, tenant, from_status, to_status, reason, worker, attempt)
    SELECT coalesce(parent_id, task_id), task_id,
           CASE kind WHEN 'run' THEN task_id ELSE parent_id END,
           step, tenant, NULL, status, reason, worker, attempt
    FROM new_tasks
    ORDER BY task_id;
    -- Delayed ones as well: a worker that sleeps longer than the delay has to know of it.
    PERFORM notify_listeners(
        EXISTS (SELECT FROM new_tasks WHERE status = 'PENDING'), NULL::bigint[]);
    RETURN NULL;
END $$;

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
    RETURN NULL;
END $$;
