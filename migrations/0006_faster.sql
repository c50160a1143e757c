-- Version 6: functions and triggers that keep their plans and do less.

LOCK TABLE tasks, audit_log IN ACCESS EXCLUSIVE MODE;

-- --- what an audit row costs: its key is the index by which a task's story is read, and only rows of
-- runs are in the one by which a run's events are read

ALTER TABLE audit_log DROP CONSTRAINT audit_log_pkey;
ALTER TABLE audit_log ADD PRIMARY KEY (task_id, id, at);
DROP INDEX audit_log_by_task;
DROP INDEX audit_log_by_root;
CREATE INDEX audit_log_by_root ON audit_log (root_id, transaction) WHERE run_id IS NOT NULL;


-- --- what a changed row costs: each trigger reads the changed rows once

DROP TRIGGER audit_tasks_created ON tasks;
DROP TRIGGER audit_tasks ON tasks;
DROP FUNCTION audit_created_tasks();
DROP FUNCTION audit_changed_tasks();
DROP FUNCTION notify_listeners(boolean, bigint[]);
DROP FUNCTION transition_detail(tasks);

CREATE FUNCTION transition_detail(
    kind text, status task_status, reason text, last_error text, delay interval, result jsonb, gate jsonb
) RETURNS jsonb LANGUAGE sql STABLE
RETURN CASE
    WHEN reason IN ('claimed', 'succeeded')
         AND coalesce(current_setting('orchestrator.acts_for', true), '') = '' THEN '{}'::jsonb
    ELSE CASE
        WHEN reason IN ('retry', 'outage') THEN jsonb_build_object(
            'error', last_error,
            'delay_seconds', round(extract(epoch FROM delay)::numeric, 3))
        WHEN status = 'FAILED' AND kind <> 'run' THEN jsonb_build_object('error', last_error)
        ELSE '{}'::jsonb
    END || CASE
        WHEN nullif(current_setting('orchestrator.acts_for', true), '') IS NOT NULL
        THEN jsonb_build_object('by', current_setting('orchestrator.acts_for', true))
        ELSE '{}'::jsonb
    END || CASE
        WHEN reason IN ('parked', 'approved', 'rejected') THEN jsonb_strip_nulls(jsonb_build_object(
            'feedback', coalesce(result, gate -> 'decision') -> 'feedback',
            'artefact', gate -> 'artefact'))
        ELSE '{}'::jsonb
    END
END;

CREATE FUNCTION audit_created_tasks() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    told record;
BEGIN
    WITH created AS (
        SELECT n.task_id, n.parent_id, n.kind, n.step, n.tenant, n.status, n.reason, n.worker, n.attempt,
               t.to_status IS NULL AS is_illegal
        FROM new_tasks n LEFT JOIN transitions t
            ON t.from_status IS NULL AND t.to_status = n.status AND t.reason = n.reason
    ),
    logged AS (
        INSERT INTO audit_log (
            root_id, task_id, run_id, step, tenant, from_status, to_status, reason, worker, attempt)
        SELECT coalesce(parent_id, task_id), task_id,
               CASE kind WHEN 'run' THEN task_id ELSE parent_id END,
               step, tenant, NULL, status, reason, worker, attempt
        FROM created
        ORDER BY task_id
    )
    SELECT min(format('%s (%s)', status, reason)) FILTER (WHERE is_illegal) AS illegal,
           bool_or(status = 'PENDING') AS is_pending
    INTO told FROM created;
    IF told.illegal IS NOT NULL THEN
        RAISE EXCEPTION 'a task cannot be created as %', told.illegal
            USING ERRCODE = 'check_violation', CONSTRAINT = 'transitions';
    END IF;
    -- Delayed ones as well: a worker that sleeps longer than the delay has to know of it.
    IF told.is_pending THEN
        PERFORM pg_notify('tasks_claimable', '');
    END IF;
    RETURN NULL;
END $$;

CREATE FUNCTION audit_changed_tasks() RETURNS trigger LANGUAGE plpgsql AS $$
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
                   AS is_to_be_told
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
           bool_or(is_to_be_told) AS is_to_be_told
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
    RETURN NULL;
END $$;

CREATE TRIGGER audit_tasks_created AFTER INSERT ON tasks
    REFERENCING NEW TABLE AS new_tasks
    FOR EACH STATEMENT EXECUTE FUNCTION audit_created_tasks();
CREATE TRIGGER audit_tasks AFTER UPDATE ON tasks
    REFERENCING OLD TABLE AS old_tasks NEW TABLE AS new_tasks
    FOR EACH STATEMENT EXECUTE FUNCTION audit_changed_tasks();

CREATE OR REPLACE FUNCTION count_changed_tasks() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
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
    RETURN NULL;
END $$;


-- --- what a statement costs: CHECKs of one column move to its type. The types get theirs when the
-- columns have them: so no row is written anew, but each is looked at.

ALTER TABLE tasks
    DROP CONSTRAINT tenant_is_a_name,
    DROP CONSTRAINT name_is_a_name_and_no_number,
    DROP CONSTRAINT key_is_not_empty,
    DROP CONSTRAINT priority_is_a_digit,
    DROP CONSTRAINT counters_count_up,
    DROP CONSTRAINT own_limits_allow_a_try,
    DROP CONSTRAINT route_is_known,
    DROP CONSTRAINT cost_is_no_debt,
    DROP CONSTRAINT running_is_leased,
    DROP CONSTRAINT run_only_waits_and_ends,
    DROP CONSTRAINT final_is_finished;

CREATE DOMAIN tenant_name AS text;
CREATE DOMAIN task_name AS text;
CREATE DOMAIN client_key AS text;
CREATE DOMAIN digit AS smallint;
CREATE DOMAIN tally AS bigint;
CREATE DOMAIN try_limit AS integer;
CREATE DOMAIN time_limit AS double precision;
CREATE DOMAIN asked_route AS text;
CREATE DOMAIN taken_route AS text;
CREATE DOMAIN amount AS numeric;
ALTER TABLE tasks
    ALTER COLUMN tenant TYPE tenant_name,
    ALTER COLUMN name TYPE task_name,
    ALTER COLUMN idempotency_key TYPE client_key,
    ALTER COLUMN priority TYPE digit,
    ALTER COLUMN attempt TYPE tally,
    ALTER COLUMN delivery_count TYPE tally,
    ALTER COLUMN retry_count TYPE tally,
    ALTER COLUMN reclaim_count TYPE tally,
    ALTER COLUMN max_retry TYPE try_limit,
    ALTER COLUMN timeout_seconds TYPE time_limit,
    ALTER COLUMN requested_route TYPE asked_route,
    ALTER COLUMN route TYPE taken_route,
    ALTER COLUMN prompt_tokens TYPE tally,
    ALTER COLUMN completion_tokens TYPE tally,
    ALTER COLUMN cost TYPE amount;
ALTER DOMAIN tenant_name ADD CONSTRAINT tenant_is_a_name CHECK (
    VALUE ~ '^[A-Za-z0-9_-]+$' AND char_length(VALUE) <= 64);
ALTER DOMAIN task_name ADD CONSTRAINT name_is_a_name_and_no_number CHECK (
    VALUE ~ '^[A-Za-z0-9_-]+$' AND char_length(VALUE) <= 64 AND VALUE !~ '^[0-9]+$');
ALTER DOMAIN client_key ADD CONSTRAINT key_is_not_empty CHECK (VALUE <> '');
ALTER DOMAIN digit ADD CONSTRAINT priority_is_a_digit CHECK (VALUE BETWEEN 0 AND 9);
ALTER DOMAIN tally ADD CONSTRAINT counters_count_up CHECK (VALUE >= 0);
ALTER DOMAIN try_limit ADD CONSTRAINT own_limits_allow_a_try CHECK (VALUE >= 1);
ALTER DOMAIN time_limit ADD CONSTRAINT own_limits_allow_a_try CHECK (VALUE > 0);
ALTER DOMAIN asked_route ADD CONSTRAINT route_is_known CHECK (
    VALUE IN ('auto', 'local', 'cloud', 'none'));
ALTER DOMAIN taken_route ADD CONSTRAINT route_is_known CHECK (VALUE IN ('local', 'cloud'));
ALTER DOMAIN amount ADD CONSTRAINT cost_is_no_debt CHECK (VALUE >= 0);

ALTER TABLE tasks
    ADD CONSTRAINT counters_count_up CHECK (attempt >= delivery_count),
    ADD CONSTRAINT running_is_leased CHECK (CASE WHEN status = 'RUNNING'
        THEN (lease_token, lease_expires_at, worker, started_at) IS NOT NULL
        ELSE (lease_token, lease_expires_at) IS NULL END),
    ADD CONSTRAINT run_only_waits_and_ends CHECK (
        kind <> 'run' OR status = 'BLOCKED' OR status >= 'SUCCEEDED'),
    ADD CONSTRAINT final_is_finished CHECK (
        (status >= 'SUCCEEDED') = (finished_at IS NOT NULL));


DROP FUNCTION due_tenants(text[], text, integer);
CREATE FUNCTION due_tenants(
    routes text[], after_tenant text, at_most integer, from_task bigint DEFAULT 0
) RETURNS TABLE (place integer, tenant text) LANGUAGE plpgsql STABLE AS $$
DECLARE
    last_tenant text := '~';  -- sorts behind every name
BEGIN
    place := 0;
    tenant := after_tenant;
    WHILE place < at_most LOOP
        -- Both bounds are the index's: a condition beside them would be asked of each row in turn. So
        -- is the order, all of it: other indexes begin with the tenant as well.
        SELECT min(first_of_route.tenant) INTO tenant
        FROM unnest(routes) AS asked(route) CROSS JOIN LATERAL (
            SELECT t.tenant FROM tasks t
            WHERE t.due AND NOT t.alone AND t.requested_route = asked.route
              AND t.tenant > due_tenants.tenant AND t.tenant <= last_tenant
              AND t.task_id >= from_task
            ORDER BY t.tenant, t.priority DESC, t.task_id
            LIMIT 1) AS first_of_route;
        IF tenant IS NOT NULL THEN
            place := place + 1;
            RETURN NEXT;
            EXIT WHEN tenant = last_tenant;  -- once round
        ELSIF last_tenant = after_tenant THEN
            RETURN;
        ELSE
            last_tenant := after_tenant;
            tenant := '';
        END IF;
    END LOOP;
END $$;

-- A claim. Its statements stand in functions because Postgres keeps their plans there: planning
-- them anew took longer than running them. A plan that was made while the table was empty is kept as
-- well, until it is analysed: so these have to read by an index even there. Which tasks are wanted is
-- the worker's policy, see queries/claims.py: [{"requested_route": …, "budget": …, "min_chars": …, "max_chars": …}, …].

-- PENDING tasks whose available_at has come are marked due: the claim's index holds only due rows,
-- so a million delayed ones do not stand in its way. Returns the seconds until the next one's time;
-- NULL: there is none.
CREATE FUNCTION mark_due() RETURNS double precision LANGUAGE plpgsql AS $$
DECLARE
    next_due timestamptz;
BEGIN
    FOR turn IN 1..2 LOOP
        SELECT available_at INTO next_due FROM tasks
        WHERE status = 'PENDING' AND NOT due ORDER BY available_at LIMIT 1;
        EXIT WHEN turn = 2 OR next_due IS NULL OR next_due > current_instant();
        UPDATE tasks SET due = true
        WHERE task_id IN (
            SELECT task_id FROM tasks
            WHERE status = 'PENDING' AND NOT due AND available_at <= (SELECT current_instant())
            ORDER BY available_at
            LIMIT 1000
            FOR NO KEY UPDATE SKIP LOCKED);
    END LOOP;
    RETURN extract(epoch FROM next_due - current_instant());
END $$;

-- How many tasks are due, counted no further than `at_most`. The order is that of the index to be
-- used: without it the planner, where it expects many such rows, reads the table from its beginning
-- until it meets one, past all that is finished.
CREATE FUNCTION count_due(at_most integer) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (
        SELECT count(*) FROM (
            SELECT FROM tasks WHERE due AND NOT alone
            ORDER BY requested_route, tenant, priority DESC, task_id
            LIMIT at_most) AS d);
END $$;

-- What a policy may have to know before it says what it wants; calls in flight are counted by route,
-- of all workers.
CREATE FUNCTION look_at_queue(
    depth_limit integer, count_in_flight boolean, OUT depth bigint, OUT in_flight jsonb
) LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
BEGIN
    PERFORM mark_due();
    depth := count_due(depth_limit);
    IF count_in_flight THEN
        SELECT jsonb_object_agg(route, calls) INTO in_flight FROM (
            SELECT route, count(*) AS calls FROM tasks
            WHERE CASE WHEN status = 'RUNNING' THEN true END AND route IS NOT NULL
            GROUP BY route) AS running;
    END IF;
END $$;

-- Whether a policy wants a task that asks for this route.
CREATE FUNCTION is_wanted(wanted jsonb, requested_route text, payload jsonb) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM jsonb_to_recordset(wanted) AS asked(
            requested_route text, min_chars integer, max_chars integer)
        WHERE asked.requested_route = is_wanted.requested_route
          AND (min_chars IS NULL OR prompt_length(payload) >= min_chars)
          AND (max_chars IS NULL OR prompt_length(payload) <= max_chars));
END $$;

-- The end of every claim: PENDING -> RUNNING (claimed), with a fresh token. A token is 74 random bits of
-- its claim and the task's number: to draw one for each task would be a seventh of the claim's time.
CREATE FUNCTION lease_tasks(chosen bigint[], by_worker text, lease_seconds double precision)
RETURNS json LANGUAGE plpgsql AS $$
DECLARE
    of_claim CONSTANT text := left(gen_random_uuid()::text, 24);
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
        RETURNING t.task_id, t.parent_id AS run_id, t.step, t.lease_token::text, t.priority,
                  t.tenant, t.kind, t.payload, t.gate, t.requested_route, t.timeout_seconds,
                  t.attempt, t.delivery_count, t.retry_count
    )
    SELECT json_agg(claimed ORDER BY priority DESC, task_id) INTO leased FROM claimed;
    RETURN leased;
END $$;

-- Leases up to `slots` due tasks. Fair between tenants: each of those that have something due gives
-- an equal share of the batch, and the round starts after the tenant that was last served. Of each
-- kind of route no more is taken than its budget allows (one that is not named has no limit).
--
-- What was claimed leaves dead entries at the front of the index until they are vacuumed away, and an
-- old snapshot keeps them all: to pass them again and again costs more than all the rest. So a claim
-- can begin at `from_task`, the lowest number that the one before took. It looks at lower ones as
-- well if these do not fill its slots, or are not all of the usual priority: then others, older ones
-- that the one before had no slot for, would be passed over.
CREATE FUNCTION claim_tasks(
    by_worker     text,
    slots         integer,
    lease_seconds double precision,
    wanted        jsonb,
    budgets       jsonb,
    after_tenant  text,
    depth_limit   integer,
    from_task     bigint,
    OUT tasks            json,             -- NULL: none
    OUT last_tenant      text,             -- to which the round came; NULL: nothing is due
    OUT is_any_left      boolean,          -- another claim may find more
    OUT depth            bigint,           -- due besides these; NULL: no choice depends on it
    OUT has_suspect      boolean,          -- a task can have its last try now, alone
    OUT next_due_seconds double precision, -- until the next delayed task is due; NULL: there is none
    OUT next_from        bigint            -- where a claim soon after this one may begin; NULL: at 0
) LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    routes CONSTANT text[] := ARRAY(
        SELECT asked ->> 'requested_route' FROM jsonb_array_elements(wanted) AS asked);
    tenants text[];
    share   bigint;
    chosen  bigint[];
    is_auto boolean;
BEGIN
    next_due_seconds := mark_due();
    LOOP
        tenants := ARRAY(
            SELECT tenant FROM due_tenants(routes, after_tenant, slots, from_task) ORDER BY place);
        last_tenant := tenants[cardinality(tenants)];
        is_any_left := false;
        IF last_tenant IS NOT NULL THEN
            share := ceil(slots / cardinality(tenants)::numeric);
            WITH asked AS (
                SELECT * FROM jsonb_to_recordset(wanted) AS w(
                    requested_route text, budget text, min_chars integer, max_chars integer)
            ),
            locked AS (
                SELECT visited.place, asked.budget, candidate.*
                FROM unnest(tenants) WITH ORDINALITY AS visited(tenant, place) CROSS JOIN asked
                CROSS JOIN LATERAL (
                    SELECT t.task_id, t.priority, t.requested_route FROM tasks t
                    WHERE t.due AND NOT t.alone
                      AND t.requested_route = asked.requested_route AND t.tenant = visited.tenant
                      AND t.task_id >= from_task
                      AND (asked.min_chars IS NULL OR prompt_length(t.payload) >= asked.min_chars)
                      AND (asked.max_chars IS NULL OR prompt_length(t.payload) <= asked.max_chars)
                    ORDER BY t.priority DESC, t.task_id
                    LIMIT share
                    FOR NO KEY UPDATE SKIP LOCKED) AS candidate
            ),
            ranked AS (
                SELECT task_id, budget, place, priority, requested_route,
                       row_number() OVER (
                           PARTITION BY place ORDER BY priority DESC, task_id) AS place_in_tenant,
                       row_number() OVER (
                           PARTITION BY budget ORDER BY priority DESC, task_id) AS place_in_budget
                FROM locked
            ),
            taken AS (
                SELECT task_id, priority, requested_route FROM ranked
                WHERE place_in_tenant <= share
                  AND place_in_budget <= coalesce((budgets ->> budget)::bigint, slots)
                ORDER BY place_in_tenant, place
                LIMIT slots
            )
            SELECT array_agg(task_id), bool_or(requested_route = 'auto'),
                   (SELECT max(place_in_tenant) >= share OR count(*) > (SELECT count(*) FROM taken)
                    FROM ranked),
                   CASE WHEN count(*) = slots AND bool_and(priority = 0)
                        AND cardinality(tenants) < slots AND budgets = '{}' THEN min(task_id) END
            INTO chosen, is_auto, is_any_left, next_from
            FROM taken;
        END IF;
        EXIT WHEN from_task = 0 OR next_from IS NOT NULL;
        from_task := 0;
    END LOOP;
    IF chosen IS NOT NULL THEN
        tasks := lease_tasks(chosen, by_worker, lease_seconds);
    END IF;
    IF last_tenant IS NOT NULL AND is_any_left IS NOT TRUE THEN
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
    has_suspect := (
        SELECT t.task_id FROM tasks t
        WHERE t.due AND t.alone AND t.requested_route = ANY(routes)
          AND is_wanted(wanted, t.requested_route, t.payload)
        ORDER BY t.task_id LIMIT 1) IS NOT NULL;
END $$;

-- Leases a task that has its last try, alone: no other may share a process with it.
CREATE FUNCTION claim_suspect(
    by_worker text, lease_seconds double precision, wanted jsonb
) RETURNS json LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    routes CONSTANT text[] := ARRAY(
        SELECT asked ->> 'requested_route' FROM jsonb_array_elements(wanted) AS asked);
    chosen bigint;
BEGIN
    SELECT t.task_id INTO chosen FROM tasks t
    WHERE t.due AND t.alone AND t.requested_route = ANY(routes)
      AND is_wanted(wanted, t.requested_route, t.payload)
    ORDER BY t.task_id
    LIMIT 1
    FOR NO KEY UPDATE SKIP LOCKED;
    RETURN lease_tasks(ARRAY[chosen], by_worker, lease_seconds);
END $$;


-- Jobs: what is written of them at every step.

DROP FUNCTION hold_lease(bigint, uuid);
CREATE FUNCTION hold_lease(held_task bigint, held_token uuid) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    tenant_of_task text;
BEGIN
    SELECT tenant INTO tenant_of_task FROM tasks
    WHERE task_id = held_task AND lease_token = held_token AND status = 'RUNNING'
    FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the lease of task % is gone', held_task USING ERRCODE = 'LL001';
    END IF;
    RETURN tenant_of_task;
END $$;

CREATE FUNCTION reserve_call(
    held_task        bigint,
    held_token       uuid,
    node             text,
    node_run         text,
    ordinal          integer,
    tokens           bigint,
    token_budget     bigint,
    tokens_per_day   bigint,
    OUT reply        text,
    OUT call_id      bigint,
    OUT refused_by   text
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    payer  CONSTANT text := hold_lease(held_task, held_token);
    moment CONSTANT timestamptz := current_instant();
    spent  bigint;
BEGIN
    SELECT c.reply INTO reserve_call.reply FROM model_calls c
    WHERE c.task_id = held_task AND c.node_run = reserve_call.node_run
      AND c.ordinal = reserve_call.ordinal AND c.reply IS NOT NULL;
    IF FOUND THEN
        RETURN;
    END IF;
    IF token_budget IS NOT NULL THEN
        SELECT sum(CASE
            WHEN c.ended_at IS NULL THEN c.reserved_tokens
            ELSE c.prompt_tokens + c.completion_tokens END) INTO spent
        FROM model_calls c WHERE c.task_id = held_task;
        IF tokens + coalesce(spent, 0) > token_budget THEN
            refused_by := 'token_budget';
            RETURN;
        END IF;
    END IF;
    IF tokens_per_day > 0 THEN
        INSERT INTO tenant_tokens AS d (tenant, day, taken)
        SELECT payer, (moment AT TIME ZONE 'UTC')::date, tokens WHERE tokens <= tokens_per_day
        ON CONFLICT (tenant, day) DO UPDATE SET taken = d.taken + excluded.taken
        WHERE d.taken + excluded.taken <= tokens_per_day;
        IF NOT FOUND THEN
            refused_by := 'tenant_tokens_per_day';
            RETURN;
        END IF;
    END IF;
    INSERT INTO model_calls AS c (task_id, node, node_run, ordinal, reserved_tokens, reserved_at)
    VALUES (
        held_task, reserve_call.node, reserve_call.node_run, reserve_call.ordinal, tokens, moment)
    RETURNING c.call_id INTO reserve_call.call_id;
END $$;

CREATE FUNCTION end_call(
    held_task         bigint,
    held_token        uuid,
    ended_call        bigint,
    prompt_tokens     bigint,
    completion_tokens bigint,
    cost              numeric,
    route             text,
    model             text,
    reply             text
) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    payer CONSTANT text := hold_lease(held_task, held_token);
    ended record;
BEGIN
    UPDATE model_calls c
    SET ended_at = current_instant(),
        prompt_tokens = end_call.prompt_tokens,
        completion_tokens = end_call.completion_tokens,
        cost = end_call.cost,
        route = end_call.route,
        model = end_call.model,
        reply = CASE WHEN NOT EXISTS (
            SELECT FROM model_calls o
            WHERE o.task_id = c.task_id AND o.node_run = c.node_run AND o.ordinal = c.ordinal
              AND o.reply IS NOT NULL) THEN end_call.reply END
    WHERE c.call_id = ended_call AND c.task_id = held_task AND c.ended_at IS NULL
    RETURNING (c.reserved_at AT TIME ZONE 'UTC')::date AS day,
              c.prompt_tokens + c.completion_tokens - c.reserved_tokens AS more_than_reserved
    INTO ended;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    UPDATE tasks t
    SET prompt_tokens = t.prompt_tokens + end_call.prompt_tokens,
        completion_tokens = t.completion_tokens + end_call.completion_tokens,
        cost = CASE WHEN end_call.cost IS NULL THEN t.cost
               ELSE coalesce(t.cost, 0) + end_call.cost END,
        route = coalesce(end_call.route, t.route),
        model = coalesce(end_call.model, t.model)
    WHERE t.task_id = held_task AND t.lease_token = held_token AND t.status = 'RUNNING';
    IF ended.more_than_reserved <> 0 THEN
        UPDATE tenant_tokens d
        SET taken = greatest(0, d.taken + ended.more_than_reserved)
        WHERE d.tenant = payer AND d.day = ended.day;
    END IF;
END $$;

CREATE FUNCTION show_state(
    of_task       bigint,
    checkpoint_id text,
    parent_id     text,
    next_nodes    text[],
    graph_version text,
    state         jsonb
) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO job_states (
        task_id, checkpoint_id, attempt, nodes, next_nodes, graph_version, state, prompt_tokens,
        completion_tokens)
    SELECT t.task_id, show_state.checkpoint_id, t.attempt,
           coalesce((
               SELECT array_remove(s.next_nodes, '__start__') FROM job_states s
               WHERE s.task_id = t.task_id AND s.checkpoint_id = show_state.parent_id), '{}'),
           show_state.next_nodes, show_state.graph_version, show_state.state, t.prompt_tokens,
           t.completion_tokens
    FROM tasks t
    WHERE t.task_id = of_task
    ON CONFLICT (task_id, checkpoint_id) DO UPDATE
    SET next_nodes = excluded.next_nodes, state = excluded.state;
END $$;

-- One task at a time.

CREATE FUNCTION create_task(
    tenant            text,
    kind              text,
    payload           jsonb,
    name              text,
    metadata          jsonb,
    priority          integer,
    delay_seconds     double precision,
    max_retry         integer,
    timeout_seconds   double precision,
    requested_route   text,
    idempotency_scope text,
    idempotency_key   text,
    request_hash      bytea,
    callback_url      text
) RETURNS bigint LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    created bigint;
BEGIN
    INSERT INTO tasks (
        tenant, kind, payload, name, metadata, priority, available_at, due, max_retry,
        timeout_seconds, requested_route, idempotency_scope, idempotency_key, request_hash,
        callback_url)
    VALUES (
        create_task.tenant, create_task.kind, create_task.payload, create_task.name,
        create_task.metadata, create_task.priority,
        current_instant() + make_interval(secs => delay_seconds), delay_seconds = 0,
        create_task.max_retry, create_task.timeout_seconds, create_task.requested_route,
        create_task.idempotency_scope, create_task.idempotency_key, create_task.request_hash,
        create_task.callback_url)
    ON CONFLICT (tenant, idempotency_scope, idempotency_key) WHERE idempotency_key IS NOT NULL
        DO NOTHING
    RETURNING task_id INTO created;
    RETURN created;
END $$;

CREATE OR REPLACE FUNCTION submit_task(
    prompt          text,
    tenant          text             DEFAULT 'default',
    priority        integer          DEFAULT 0,
    delay_seconds   double precision DEFAULT 0,
    max_retry       integer          DEFAULT NULL,
    timeout_seconds double precision DEFAULT NULL,
    requested_route text             DEFAULT 'auto',
    metadata        jsonb            DEFAULT NULL,
    idempotency_key text             DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    refused  text;
    digest   bytea;
    existing record;
    stored   bigint;
BEGIN
    -- What is NULL without being allowed to be falls through to the columns' NOT NULL.
    refused := CASE
        WHEN coalesce(prompt, '') !~ '\S'
            THEN 'prompt: it is empty; say what the model is to do'
        WHEN tenant !~ '^[A-Za-z0-9_-]{1,64}$'
            THEN 'tenant: it is to be 1 to 64 of A-Z a-z 0-9 _ -'
        WHEN priority NOT BETWEEN 0 AND 9
            THEN 'priority: it is to be 0 to 9'
        WHEN NOT coalesce(delay_seconds BETWEEN 0 AND 31536000, false)
            THEN 'delay_seconds: it is to be 0 to 31536000 (a year)'
        WHEN max_retry NOT BETWEEN 1 AND 10000
            THEN 'max_retry: it is to be 1 to 10000'
        WHEN NOT (timeout_seconds > 0 AND timeout_seconds <= 604800)
            THEN 'timeout_seconds: it is to be more than 0 and at most 604800 (a week)'
        WHEN requested_route NOT IN ('auto', 'local', 'cloud')
            THEN 'requested_route: it is to be auto, local or cloud'
        WHEN jsonb_typeof(metadata) <> 'object'
            THEN 'metadata: it is to be an object'
        WHEN idempotency_key !~ '^[ -~]{1,255}$'
            THEN 'idempotency_key: it is to be 1 to 255 printable ASCII characters'
    END;
    IF refused IS NOT NULL THEN
        RAISE EXCEPTION '%', refused USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF idempotency_key IS NOT NULL THEN
        digest := sha256(convert_to(jsonb_build_array(
            prompt, priority, delay_seconds, max_retry, timeout_seconds, requested_route,
            metadata)::text, 'UTF8'));
    END IF;
    LOOP
        stored := create_task(
            tenant, 'prompt', jsonb_build_object('prompt', prompt), NULL, metadata, priority,
            delay_seconds, max_retry, timeout_seconds, requested_route,
            CASE WHEN digest IS NOT NULL THEN 'sql' END, idempotency_key, digest, NULL);
        EXIT WHEN stored IS NOT NULL;
        -- The key is taken. Its holder may have rolled back meanwhile: then insert again.
        SELECT t.task_id, t.request_hash INTO existing FROM tasks t
        WHERE t.tenant = submit_task.tenant AND t.idempotency_scope = 'sql'
          AND t.idempotency_key = submit_task.idempotency_key;
        IF existing.task_id IS NOT NULL AND existing.request_hash <> digest THEN
            RAISE EXCEPTION
                'this idempotency_key came with other arguments before; use a new key for a new task'
                USING ERRCODE = 'unique_violation', CONSTRAINT = 'tasks_idempotency';
        END IF;
        stored := existing.task_id;
        EXIT WHEN stored IS NOT NULL;
    END LOOP;
    RETURN stored;
END $$;


-- A settle and what follows from it are functions, because a function keeps its plans, and to plan
-- these statements costs more than to run them. A plan may have been made when the tables were all
-- but empty, and has to be good when they are full: each row looked up by its key. So what is no key
-- is compared by IS NOT DISTINCT FROM, for which no index can be used, and joined keys by
-- = ANY(ARRAY[x]), which no scan of a whole index could serve.

-- A run: BLOCKED -> SUCCEEDED, FAILED, CANCELLED, once none of its steps has anything before it. For
-- whoever has locked the rows of these runs.
CREATE FUNCTION end_runs(run_ids bigint[]) RETURNS void LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    ended bigint[] := ARRAY(
        SELECT run_id FROM unnest(run_ids) AS run_id
        WHERE (SELECT s.task_id FROM tasks s
               WHERE s.parent_id = run_id
                 AND s.status IN ('BLOCKED', 'PENDING', 'RUNNING', 'AWAITING_APPROVAL')
               LIMIT 1) IS NULL);
BEGIN
    IF ended = '{}' THEN
        RETURN;
    END IF;
    UPDATE tasks run
    SET (status, reason) = (
            SELECT end_of_run.status, end_of_run.reason
            FROM (VALUES ('SUCCEEDED'::task_status, 'succeeded'), ('FAILED', 'dependency_failed'),
                         ('CANCELLED', 'cancelled')) AS end_of_run(status, reason)
            WHERE end_of_run.status = CASE
                WHEN run.cancel_requested THEN 'CANCELLED'
                WHEN (SELECT s.task_id FROM tasks s
                      WHERE s.parent_id = run.task_id
                        AND s.status IS NOT DISTINCT FROM 'FAILED'
                      LIMIT 1) IS NOT NULL THEN 'FAILED'
                WHEN (SELECT s.task_id FROM tasks s
                      WHERE s.parent_id = run.task_id
                        AND s.status IS NOT DISTINCT FROM 'CANCELLED'
                      LIMIT 1) IS NOT NULL THEN 'CANCELLED'
                ELSE 'SUCCEEDED'
            END::task_status),
        finished_at = current_instant(), updated_at = current_instant()
    WHERE run.task_id = ANY(ended) AND run.status IS NOT DISTINCT FROM 'BLOCKED';
END $$;


-- What the end of steps does to the rest of their runs: for whoever has ended these steps, in this
-- transaction, and had locked the rows of these runs before. Each effect is a statement of its own,
-- so that the audit log has causes before effects, and a row is changed once per statement.
CREATE FUNCTION end_steps(succeeded bigint[], dead bigint[], run_ids bigint[]) RETURNS void
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    waiting bigint[];  -- those that depend on one that has succeeded
    met     bigint[];  -- on how many
    doomed  bigint[];
BEGIN
    SELECT array_agg(task_id), array_agg(times) INTO waiting, met
    FROM (
        SELECT e.task_id, count(*) AS times
        FROM unnest(succeeded) AS ended_id CROSS JOIN LATERAL (
            SELECT task_id FROM step_edges WHERE needs = ended_id OFFSET 0) AS e
        GROUP BY e.task_id) AS edges;
    -- BLOCKED -> PENDING, AWAITING_APPROVAL (promoted), where the last dependency has succeeded now.
    -- A step succeeds once, so it is counted once, also by a dependent that is CANCELLED for now.
    IF waiting IS NOT NULL THEN
        WITH counted AS (
            SELECT t.task_id, t.unmet - met.times AS unmet,
                   t.status = 'BLOCKED' AND t.unmet = met.times AS is_ready,
                   CASE t.kind WHEN 'approval' THEN 'AWAITING_APPROVAL' ELSE 'PENDING' END::task_status
                       AS ready_status
            FROM unnest(waiting, met) AS met(task_id, times)
            JOIN tasks t ON t.task_id = ANY(ARRAY[met.task_id])
        ),
        moment AS (SELECT current_instant() AS at)
        UPDATE tasks t
        SET unmet = c.unmet,
            status = CASE WHEN c.is_ready THEN c.ready_status ELSE t.status END,
            reason = CASE WHEN c.is_ready THEN 'promoted' ELSE t.reason END,
            due = c.is_ready AND c.ready_status = 'PENDING',
            available_at = CASE WHEN c.is_ready THEN moment.at ELSE t.available_at END,
            updated_at = moment.at
        FROM counted c CROSS JOIN moment
        WHERE t.task_id = ANY(ARRAY[c.task_id]);
    END IF;

    -- BLOCKED -> CANCELLED (dependency_failed): what can never run, now that these are dead.
    IF dead <> '{}' THEN
        doomed := ARRAY(
            WITH RECURSIVE doomed AS (
                SELECT unnest(dead) AS task_id
                UNION
                SELECT e.task_id FROM doomed CROSS JOIN LATERAL (
                    SELECT task_id FROM step_edges WHERE needs = doomed.task_id OFFSET 0) AS e
            )
            SELECT task_id FROM doomed);
        UPDATE tasks
        SET status = 'CANCELLED', reason = 'dependency_failed',
            finished_at = current_instant(), updated_at = current_instant()
        WHERE task_id = ANY(doomed) AND status IS NOT DISTINCT FROM 'BLOCKED';
    END IF;

    PERFORM end_runs(run_ids);
END $$;


-- RUNNING -> wherever the outcomes lead, for the holders of the leases only; `run_ids` are the runs
-- of those that are steps. Tells what became of which task; one that is missing was no longer ours.
-- The verdict becomes a reason (a task that is to be cancelled ends so whatever came of it), and
-- `transitions` says which status that reason leads to. Tokens and money add up over the attempts. A
-- tool may return null, which is a result as well.
CREATE FUNCTION settle_tasks(
    outcomes jsonb, run_ids bigint[], usual_max_retry integer, usual_max_delay double precision
) RETURNS json LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    told      json;
    succeeded bigint[];
    dead      bigint[];
    ended_in  bigint[];  -- the runs of both
BEGIN
    IF run_ids <> '{}' THEN
        PERFORM FROM tasks
        WHERE task_id = ANY(run_ids)
        ORDER BY task_id
        FOR NO KEY UPDATE;
    END IF;

    WITH outcome AS (
        SELECT * FROM jsonb_to_recordset(outcomes) AS o(
            task_id bigint, token uuid, verdict text, result jsonb, error text, route text,
            model text, prompt_tokens bigint, completion_tokens bigint, cost numeric,
            truncated boolean, delay_seconds double precision, gate jsonb,
            max_retry integer, max_delay_seconds double precision)
        ORDER BY task_id
    ),
    held AS (
        SELECT o.*, leased.lease_token, leased.cancel_requested, leased.retry_count,
               coalesce(leased.max_retry, o.max_retry, usual_max_retry) AS most_failures
        FROM outcome o CROSS JOIN LATERAL (
            SELECT t.lease_token, t.cancel_requested, t.retry_count, t.max_retry FROM tasks t
            WHERE t.task_id = o.task_id AND t.status = 'RUNNING' AND t.lease_token = o.token
            FOR NO KEY UPDATE) AS leased
    ),
    judged AS (
        SELECT held.*,
               CASE
                   WHEN held.cancel_requested THEN 'cancelled'
                   WHEN held.verdict <> 'failure' THEN held.verdict
                   WHEN held.retry_count + 1 >= held.most_failures THEN 'max_retry'
                   ELSE 'retry'
               END AS new_reason,
               CASE
                   WHEN held.verdict = 'failure'
                   THEN least(coalesce(held.max_delay_seconds, usual_max_delay),
                              power(2, least(held.retry_count + 1, 60)))
                   ELSE coalesce(held.delay_seconds, 0)
               END AS wait_seconds
        FROM held
    ),
    decided AS (
        SELECT judged.*, transitions.to_status
        FROM judged JOIN transitions
            ON transitions.from_status = 'RUNNING' AND transitions.reason = judged.new_reason
    ),
    moment AS (SELECT current_instant() AS at),
    settled AS (
        UPDATE tasks t
        SET status = d.to_status,
            reason = d.new_reason,
            result = CASE WHEN d.to_status = 'SUCCEEDED' THEN coalesce(d.result, 'null') END,
            result_bytes = CASE
                WHEN d.to_status = 'SUCCEEDED' THEN octet_length(d.result::text) END,
            last_error = CASE
                WHEN d.to_status <> 'SUCCEEDED' THEN coalesce(d.error, t.last_error) END,
            route = coalesce(d.route, t.route),
            model = coalesce(d.model, t.model),
            prompt_tokens = t.prompt_tokens + coalesce(d.prompt_tokens, 0),
            completion_tokens = t.completion_tokens + coalesce(d.completion_tokens, 0),
            cost = CASE WHEN d.cost IS NULL THEN t.cost ELSE coalesce(t.cost, 0) + d.cost END,
            truncated = coalesce(d.truncated, false),
            retry_count = t.retry_count
                + (d.verdict IN ('failure', 'permanent', 'deadline', 'recursion_limit'))::int,
            delivery_count = t.delivery_count
                - (d.new_reason IN ('released', 'outage', 'parked'))::int,
            gate = CASE WHEN d.new_reason = 'parked' THEN d.gate ELSE t.gate END,
            duration_seconds = extract(epoch FROM moment.at - t.started_at),
            lease_token = NULL,
            lease_expires_at = NULL,
            cancel_requested = t.cancel_requested AND d.to_status = 'CANCELLED',
            due = d.to_status = 'PENDING' AND d.wait_seconds = 0,
            available_at = CASE
                WHEN d.to_status = 'PENDING' THEN moment.at + make_interval(secs => d.wait_seconds)
                ELSE t.available_at END,
            updated_at = moment.at,
            finished_at = CASE
                WHEN d.to_status NOT IN ('PENDING', 'AWAITING_APPROVAL') THEN moment.at END
        FROM decided d CROSS JOIN moment
        WHERE t.task_id = ANY(ARRAY[d.task_id])
          AND t.status IS NOT DISTINCT FROM 'RUNNING'
          AND t.lease_token IS NOT DISTINCT FROM d.lease_token
        RETURNING t.task_id, t.parent_id AS run_id, d.lease_token AS token, t.status,
                  t.reason, t.attempt, t.retry_count, t.delivery_count,
                  greatest(0, extract(epoch FROM t.available_at - t.updated_at)) AS delay_seconds,
                  t.last_error AS error, t.truncated
    )
    SELECT json_agg(settled),
           array_agg(task_id) FILTER (WHERE run_id IS NOT NULL AND status = 'SUCCEEDED'),
           array_agg(task_id) FILTER (
               WHERE run_id IS NOT NULL AND status IN ('FAILED', 'CANCELLED')),
           array_agg(DISTINCT run_id) FILTER (
               WHERE run_id IS NOT NULL AND status IN ('SUCCEEDED', 'FAILED', 'CANCELLED'))
    INTO told, succeeded, dead, ended_in
    FROM settled;

    IF ended_in IS NOT NULL THEN
        PERFORM end_steps(succeeded, dead, ended_in);
    END IF;
    RETURN told;
END $$;


-- Columns of another type have lost their statistics.
ANALYZE tasks;
ANALYZE audit_log;
