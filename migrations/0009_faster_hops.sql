-- Version 9: a settle that claims, claims that tell one value, and changes counted where they are audited.

DROP FUNCTION claim_tasks(text, integer, double precision, jsonb, jsonb, text, integer, bigint);
-- The end of every claim: PENDING -> RUNNING (claimed), with a fresh token: 48 random bits and the last 32
-- of the transaction's number, which are of the claim, and the task's number. No two claims of a task have
-- the same, even where somebody has set the seed; and if transactions were lost, with a primary that had
-- not passed them on, and their numbers come again, the random bits tell. gen_random_uuid would
-- open a file each time, where Postgres was built without OpenSSL.
-- Tells of the tasks, the first to begin first, by one list for each column; NULL: there are none.
CREATE OR REPLACE FUNCTION lease_tasks(chosen bigint[], by_worker text, lease_seconds double precision)
RETURNS json LANGUAGE plpgsql AS $$
DECLARE
    of_claim CONSTANT text := lpad(to_hex((random() * ((1::bigint << 48) - 1))::bigint), 12, '0')
        || lpad(to_hex(mod(pg_current_xact_id()::text::bigint, 1::bigint << 32)), 8, '0');
    leased   json;
BEGIN
    WITH claimed AS (
        UPDATE tasks t
        SET status = 'RUNNING', reason = 'claimed', due = false,
            lease_token = (
                of_claim || lpad(to_hex(mod(t.task_id, 1::bigint << 48)), 12, '0'))::uuid,
            lease_expires_at = current_instant() + make_interval(secs => lease_seconds),
            worker = by_worker, started_at = current_instant(), updated_at = current_instant(),
            attempt = attempt + 1, delivery_count = delivery_count + 1
        WHERE t.task_id = ANY(chosen) AND t.status = 'PENDING' AND t.due
        RETURNING t.task_id, t.lease_token, t.parent_id, t.kind, t.payload, t.requested_route,
                  t.timeout_seconds, t.attempt, t.delivery_count, t.retry_count, t.tenant, t.step,
                  t.gate, t.priority
    )
    SELECT CASE WHEN count(*) > 0 THEN json_build_array(
               json_agg(task_id), json_agg(lease_token), json_agg(parent_id), json_agg(kind),
               json_agg(payload), json_agg(requested_route), json_agg(timeout_seconds),
               json_agg(attempt), json_agg(delivery_count), json_agg(retry_count),
               json_agg(tenant), json_agg(step), json_agg(gate)) END
    INTO leased
    FROM (SELECT * FROM claimed ORDER BY priority DESC, task_id) AS claimed;
    RETURN leased;
END $$;


-- Leases up to `slots` due tasks: all, if no more are due (and if more come while it looks, whichever come
-- first in the index), and else by shares. Tells [tasks, last_tenant, is_any_left, depth, has_suspect,
-- next_due_seconds, next_from]: one value, since to plan a message that reads columns of a function costs
-- as much as an index scan.
CREATE FUNCTION claim_tasks(
    by_worker     text,
    slots         integer,
    lease_seconds double precision,
    routes        text[],                  -- that tasks may ask for
    wanted        jsonb,                   -- NULL: whatever asks for these
    budgets       jsonb,                   -- NULL, {}: none has a limit, and `wanted` names routes only
    after_tenant  text,
    depth_limit   integer,
    from_task     bigint
) RETURNS json LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    waiting          bigint;               -- NULL: not counted
    chosen           bigint[];
    is_auto          boolean;
    tasks            json;                 -- NULL: none
    last_tenant      text;                 -- to which the round came; NULL: nothing is due
    is_any_left      boolean;              -- another claim may find more
    depth            bigint;               -- due besides these; NULL: no choice depends on it
    has_suspect      boolean;              -- a task can have its last try now, alone
    next_due_seconds double precision;     -- until the next delayed task is due; NULL: there is none
    next_from        bigint;               -- where a claim soon after this one may begin; NULL: at 0
BEGIN
    FOR look IN 1..2 LOOP
        SELECT CASE WHEN from_task = 0 AND coalesce(budgets = '{}', true) THEN (
                   SELECT count(*) FROM (
                       SELECT FROM unnest(routes) AS asked(route) CROSS JOIN LATERAL (
                           SELECT FROM tasks t
                           WHERE t.due AND NOT t.alone AND t.requested_route = asked.route
                           ORDER BY t.tenant, t.priority DESC, t.task_id
                           LIMIT slots + 1) AS of_route
                       LIMIT slots + 1) AS due) END,
               (SELECT t.task_id FROM tasks t
                WHERE t.due AND t.alone AND t.requested_route = ANY(routes)
                  AND (wanted IS NULL OR is_wanted(wanted, t.requested_route, t.payload))
                ORDER BY t.task_id LIMIT 1) IS NOT NULL,
               (SELECT extract(epoch FROM t.available_at - current_instant()) FROM tasks t
                WHERE t.status = 'PENDING' AND NOT t.due
                ORDER BY t.available_at LIMIT 1)
        INTO waiting, has_suspect, next_due_seconds;
        EXIT WHEN look = 2 OR coalesce(next_due_seconds > 0, true);
        PERFORM mark_due();
    END LOOP;

    IF waiting = 0 THEN
        is_any_left := false;
    ELSIF waiting <= slots THEN
        last_tenant := after_tenant;  -- as it was: there is no round
        SELECT array_agg(task_id), bool_or(requested_route = 'auto') INTO chosen, is_auto
        FROM (
            SELECT of_route.*
            FROM unnest(routes) AS asked(route) CROSS JOIN LATERAL (
                SELECT t.task_id, t.requested_route FROM tasks t
                WHERE t.due AND NOT t.alone AND t.requested_route = asked.route
                ORDER BY t.tenant, t.priority DESC, t.task_id
                FOR NO KEY UPDATE SKIP LOCKED) AS of_route
            LIMIT slots) AS free;
        -- Others may have come since they were counted: if all slots are taken, that is asked below.
        is_any_left := CASE
            WHEN waiting > coalesce(cardinality(chosen), 0) THEN true
            WHEN cardinality(chosen) < slots THEN false END;
    ELSE
        IF wanted IS NULL THEN
            SELECT jsonb_agg(jsonb_build_object('requested_route', route, 'budget', route)), '{}'
            INTO wanted, budgets FROM unnest(routes) AS asked(route);
        END IF;
        SELECT shares.* INTO chosen, is_auto, last_tenant, is_any_left, next_from
        FROM choose_by_shares(slots, routes, wanted, budgets, after_tenant, from_task) AS shares;
    END IF;
    IF chosen IS NOT NULL THEN
        tasks := lease_tasks(chosen, by_worker, lease_seconds);
    END IF;
    IF is_any_left IS NULL THEN
        -- What somebody else holds may be left by him.
        is_any_left := EXISTS (
            SELECT FROM unnest(routes) AS asked(route) CROSS JOIN LATERAL (
                SELECT t.task_id FROM tasks t
                WHERE t.due AND NOT t.alone AND t.requested_route = asked.route
                ORDER BY t.tenant, t.priority DESC, t.task_id
                LIMIT 1) AS first_of_route);
    END IF;
    IF is_auto AND depth_limit > 0 THEN
        depth := count_due(depth_limit);
    END IF;
    RETURN json_build_array(
        tasks, last_tenant, is_any_left, depth, has_suspect, next_due_seconds, next_from);
END $$;


-- What it did, audit_changed_tasks does now.
DROP TRIGGER count_tasks_changed ON tasks;
DROP FUNCTION count_changed_tasks();
-- A heartbeat, or an update of no row, changes no state: for it, nothing is found. The join is a FULL
-- one, though each row has its pair. The planner knows nothing of the tables of changed rows, and keeps
-- the plan it made for the first few: but this it cannot do by comparing n * n rows.
--
-- Then it tells figure_changes, see there: what is now, less what was before. A heartbeat leaves nothing.
-- Most statements only claim, or only end what has succeeded, and change a few of the figures; to ask for
-- all of them would be a twentieth of a claim of one task.
CREATE OR REPLACE FUNCTION audit_changed_tasks() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    told record;
BEGIN
    WITH paired AS (
        SELECT n.task_id, n.parent_id, n.kind, n.step, n.tenant, o.status AS old_status, n.status, n.reason,
               n.worker, n.attempt,
               transition_detail(n.kind, n.status, n.reason, n.last_error,
                                 n.available_at - n.updated_at, n.result, n.gate) AS detail,
               n.status IS DISTINCT FROM o.status OR n.reason <> o.reason
                   OR n.lease_token IS DISTINCT FROM o.lease_token AS has_moved,
               n.due AND NOT o.due AS is_claimable,
               n.callback_url IS NOT NULL AND n.finished_at IS NOT NULL AND o.finished_at IS NULL
                   AS is_to_be_told,
               o.due AS was_due,
               (n.tenant, n.kind, n.retry_count, n.reclaim_count, n.route, n.cost) IS NOT DISTINCT FROM
                   (o.tenant, o.kind, o.retry_count, o.reclaim_count, o.route, o.cost) AS is_else_as_before
        FROM new_tasks n FULL JOIN old_tasks o ON n.task_id = o.task_id
    ),
    changed AS (
        SELECT paired.*, has_moved AND t.to_status IS NULL AS is_illegal
        FROM paired LEFT JOIN transitions t
            ON t.from_status = old_status AND t.to_status = status AND t.reason = paired.reason
        WHERE has_moved OR is_claimable
    ),
    logged AS (
        INSERT INTO audit_log (
            root_id, task_id, run_id, step, tenant, from_status, to_status, reason,
            worker, attempt, detail)
        SELECT coalesce(parent_id, task_id), task_id,
               CASE kind WHEN 'run' THEN task_id ELSE parent_id END,
               step, tenant, old_status, status, reason, worker, attempt, detail
        FROM changed
        WHERE status <> old_status
        ORDER BY task_id
    )
    SELECT min(format('task %s cannot go from %s to %s (%s)', task_id, old_status, status, reason))
               FILTER (WHERE is_illegal) AS illegal,
           string_agg(concat_ws(',', task_id, parent_id), ',') FILTER (WHERE has_moved) AS ids,
           bool_or(is_claimable) AS is_claimable,
           bool_or(is_to_be_told) AS is_to_be_told,
           count(*) FILTER (
               WHERE is_else_as_before AND old_status = 'PENDING' AND was_due AND status = 'RUNNING'
           ) AS claimed,
           count(*) FILTER (
               WHERE is_else_as_before AND old_status = 'RUNNING' AND status = 'SUCCEEDED'
           ) AS succeeded,
           (SELECT count(*) FROM new_tasks) AS all_rows
    INTO told FROM changed;
    IF told.illegal IS NOT NULL THEN
        RAISE EXCEPTION '%', told.illegal
            USING ERRCODE = 'check_violation', CONSTRAINT = 'transitions';
    END IF;
    IF told.is_claimable THEN
        PERFORM pg_notify('tasks_claimable', '');
    END IF;
    IF told.ids IS NOT NULL THEN
        PERFORM pg_notify(
            'tasks_changed', CASE WHEN length(told.ids) < 7000 THEN told.ids ELSE '' END);
    END IF;

    -- Whoever asked to be told of an end is told by a task, born in the transaction of that end.
    IF told.is_to_be_told THEN
        INSERT INTO tasks (tenant, kind, payload, priority, requested_route)
        SELECT n.tenant, 'callback',
               jsonb_build_object('task_id', n.task_id, 'url', n.callback_url), n.priority, 'none'
        FROM new_tasks n FULL JOIN old_tasks o ON n.task_id = o.task_id
        WHERE n.callback_url IS NOT NULL AND n.finished_at IS NOT NULL AND o.finished_at IS NULL
        ORDER BY n.task_id;
    END IF;

    IF told.claimed = told.all_rows THEN
        INSERT INTO figure_changes (tenant, kind, pending, running, due)
        SELECT tenant, kind, -count(*), count(*), -count(*)
        FROM new_tasks GROUP BY tenant, kind;
    ELSIF told.succeeded = told.all_rows THEN
        INSERT INTO figure_changes (tenant, kind, running, succeeded, timed, microseconds)
        SELECT tenant, kind, -count(*), count(*), count(duration_seconds),
               sum((duration_seconds * 1000000)::bigint)
        FROM new_tasks GROUP BY tenant, kind;
    ELSE
        INSERT INTO figure_changes (
            tenant, kind, blocked, pending, running, awaiting_approval, succeeded, failed, cancelled,
            due, dead, retries, reclaimed, timed, microseconds,
            paid_local, cost_local, paid_cloud, cost_cloud)
        SELECT *
        FROM (
            SELECT
                tenant, kind,
                sum(n) FILTER (WHERE status = 'BLOCKED') AS blocked,
                sum(n) FILTER (WHERE status = 'PENDING') AS pending,
                sum(n) FILTER (WHERE status = 'RUNNING') AS running,
                sum(n) FILTER (WHERE status = 'AWAITING_APPROVAL') AS awaiting_approval,
                sum(n) FILTER (WHERE status = 'SUCCEEDED') AS succeeded,
                sum(n) FILTER (WHERE status = 'FAILED') AS failed,
                sum(n) FILTER (WHERE status = 'CANCELLED') AS cancelled,
                sum(n) FILTER (WHERE due) AS due,
                sum(n) FILTER (WHERE status = 'FAILED' AND reason <> 'rejected') AS dead,
                sum(n * retry_count) AS retries,
                sum(n) FILTER (WHERE reclaim_count > 0) AS reclaimed,
                sum(n) FILTER (
                    WHERE status = 'SUCCEEDED' AND duration_seconds IS NOT NULL) AS timed,
                sum(n * (duration_seconds * 1000000)::bigint) FILTER (
                    WHERE status = 'SUCCEEDED') AS microseconds,
                sum(n) FILTER (WHERE route = 'local' AND cost IS NOT NULL) AS paid_local,
                sum(n * cost) FILTER (WHERE route = 'local') AS cost_local,
                sum(n) FILTER (WHERE route = 'cloud' AND cost IS NOT NULL) AS paid_cloud,
                sum(n * cost) FILTER (WHERE route = 'cloud') AS cost_cloud
            FROM (
                SELECT 1 AS n, tenant, kind, status, reason, due, retry_count, reclaim_count,
                       duration_seconds, route, cost
                FROM new_tasks
                UNION ALL
                SELECT -1, tenant, kind, status, reason, due, retry_count, reclaim_count,
                       duration_seconds, route, cost
                FROM old_tasks
            ) AS task
            GROUP BY tenant, kind
        ) AS changed
        WHERE (
            blocked, pending, running, awaiting_approval, succeeded, failed, cancelled, due, dead,
            retries, reclaimed, timed, microseconds, paid_local, cost_local, paid_cloud, cost_cloud
        ) <> (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    END IF;
    RETURN NULL;
END $$;


-- A settle, and a claim of as many tasks, for the slots that it frees: what it makes due can begin
-- without another commit. It tells what both tell. The settle waits where others hold its rows, and the
-- claim, which comes after it, waits for nobody.
CREATE FUNCTION settle_and_claim(
    outcomes        jsonb,
    run_ids         bigint[],
    usual_max_retry integer,
    usual_max_delay double precision,
    by_worker       text,
    lease_seconds   double precision,
    routes          text[],
    after_tenant    text,
    depth_limit     integer,
    from_task       bigint
) RETURNS json LANGUAGE plpgsql AS $$
DECLARE
    settled CONSTANT json := settle_tasks(outcomes, run_ids, usual_max_retry, usual_max_delay);
BEGIN
    RETURN json_build_array(settled, claim_tasks(
        by_worker, jsonb_array_length(outcomes), lease_seconds, routes, NULL, NULL, after_tenant,
        depth_limit, from_task));
END $$;
