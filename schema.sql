-- Agent Orchestrator, schema version 9.
--
-- The life of a task, told once. Whatever can be claimed, retried, leased, cancelled or awaited
-- is one row of `tasks`. A row is born PENDING; once it is due, a worker claims it: RUNNING, with
-- a lease that ends by the database's clock unless the worker's heartbeat renews it, and with a
-- token that no other claim ever had. Every write of the worker names that token, so a worker
-- that lost its lease changes nothing, however late it wakes up. The work ends SUCCEEDED, FAILED
-- or CANCELLED, or goes back to PENDING: after a failure (retry), on purpose (released, outage),
-- or because the lease ran out (reaped).
--
-- Each statement that changes a state sets `status` and `reason`. The trigger `audit_tasks` looks
-- the pair up in `transitions`, refuses what is not there, and appends one row to `audit_log`, in
-- the same transaction: no code path can forget the audit or take an illegal step.
--
-- A run is a row too, the parent of its steps. It is BLOCKED until they have ended; a step is
-- BLOCKED until all that it depends on have SUCCEEDED. What the end of a step does to other rows
-- is told in end_steps.
--
-- This file installs an empty database. migrations/ brings an older one to the same shape.

CREATE TABLE schema_version (
    version      integer     PRIMARY KEY,
    installed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE schema_version IS 'One row for each version this database has gone through.';
INSERT INTO schema_version (version) VALUES (9);


-- The only clock. Tests set orchestrator.fake_now in their session to stand at a chosen instant.
-- clock_timestamp() and not now(): a lease taken late in a long transaction must not be born old.
CREATE FUNCTION current_instant() RETURNS timestamptz
LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN coalesce(
    nullif(current_setting('orchestrator.fake_now', true), '')::timestamptz,
    clock_timestamp());


CREATE TYPE task_status AS ENUM (  -- in an order: what is final comes last
    'BLOCKED',            -- waits for steps it depends on; a run: waits for its own steps
    'PENDING',            -- claimable once it is due
    'RUNNING',            -- leased to one worker
    'AWAITING_APPROVAL',  -- waits for a person, holds no lease
    'SUCCEEDED',          -- final
    'FAILED',             -- final, a dead letter
    'CANCELLED'           -- final
);


-- The state machine. Whatever is not here does not happen.
CREATE TABLE transitions (
    from_status task_status,                  -- NULL: the row is created
    to_status   task_status NOT NULL,
    reason      text        NOT NULL,
    UNIQUE NULLS NOT DISTINCT (from_status, to_status, reason)
);
INSERT INTO transitions (from_status, to_status, reason) VALUES
    (NULL,                'PENDING',           'created'),
    (NULL,                'BLOCKED',           'created'),
    (NULL,                'AWAITING_APPROVAL', 'created'),
    ('BLOCKED',           'PENDING',           'promoted'),
    ('BLOCKED',           'AWAITING_APPROVAL', 'promoted'),
    ('BLOCKED',           'CANCELLED',         'cancelled'),
    ('BLOCKED',           'CANCELLED',         'dependency_failed'),
    ('BLOCKED',           'SUCCEEDED',         'succeeded'),
    ('BLOCKED',           'FAILED',            'dependency_failed'),
    ('PENDING',           'RUNNING',           'claimed'),
    ('PENDING',           'CANCELLED',         'cancelled'),
    ('PENDING',           'CANCELLED',         'dependency_failed'),
    ('PENDING',           'FAILED',            'expired'),
    ('RUNNING',           'SUCCEEDED',         'succeeded'),
    ('RUNNING',           'PENDING',           'retry'),
    ('RUNNING',           'PENDING',           'released'),
    ('RUNNING',           'PENDING',           'outage'),
    ('RUNNING',           'PENDING',           'reaped'),
    ('RUNNING',           'AWAITING_APPROVAL', 'parked'),
    ('RUNNING',           'CANCELLED',         'cancelled'),
    ('RUNNING',           'FAILED',            'max_retry'),
    ('RUNNING',           'FAILED',            'max_delivery'),
    ('RUNNING',           'FAILED',            'permanent'),
    ('RUNNING',           'FAILED',            'deadline'),
    ('RUNNING',           'FAILED',            'recursion_limit'),
    ('AWAITING_APPROVAL', 'PENDING',           'approved'),
    ('AWAITING_APPROVAL', 'PENDING',           'rejected'),
    ('AWAITING_APPROVAL', 'SUCCEEDED',         'approved'),
    ('AWAITING_APPROVAL', 'FAILED',            'rejected'),
    ('AWAITING_APPROVAL', 'CANCELLED',         'cancelled'),
    ('AWAITING_APPROVAL', 'CANCELLED',         'dependency_failed'),
    ('CANCELLED',         'BLOCKED',           'requeued'),
    ('FAILED',            'PENDING',           'requeued'),
    ('FAILED',            'AWAITING_APPROVAL', 'requeued'),
    ('FAILED',            'BLOCKED',           'requeued');


-- What a column of `tasks` may hold by itself. The type says so, and not the table: a type's CHECK is
-- asked only where the column is written, and a session keeps it prepared, but each statement that
-- changes a row of the table prepares all of the table's CHECKs anew.
CREATE DOMAIN tenant_name AS text CONSTRAINT tenant_is_a_name CHECK (
    VALUE ~ '^[A-Za-z0-9_-]+$' AND char_length(VALUE) <= 64);
CREATE DOMAIN task_name AS text CONSTRAINT name_is_a_name_and_no_number CHECK (
    VALUE ~ '^[A-Za-z0-9_-]+$' AND char_length(VALUE) <= 64 AND VALUE !~ '^[0-9]+$');
CREATE DOMAIN client_key AS text CONSTRAINT key_is_not_empty CHECK (VALUE <> '');
CREATE DOMAIN digit AS smallint CONSTRAINT priority_is_a_digit CHECK (VALUE BETWEEN 0 AND 9);
CREATE DOMAIN tally AS bigint CONSTRAINT counters_count_up CHECK (VALUE >= 0);
CREATE DOMAIN try_limit AS integer CONSTRAINT own_limits_allow_a_try CHECK (VALUE >= 1);
CREATE DOMAIN time_limit AS double precision CONSTRAINT own_limits_allow_a_try CHECK (VALUE > 0);
CREATE DOMAIN asked_route AS text CONSTRAINT route_is_known CHECK (
    VALUE IN ('auto', 'local', 'cloud', 'none'));
CREATE DOMAIN taken_route AS text CONSTRAINT route_is_known CHECK (VALUE IN ('local', 'cloud'));
CREATE DOMAIN amount AS numeric CONSTRAINT cost_is_no_debt CHECK (VALUE >= 0);


CREATE TABLE tasks (
    -- what it is
    task_id           bigint      GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    tenant            tenant_name NOT NULL DEFAULT 'default',
    name              task_name,                             -- the submitter's own id for it
    kind              text        NOT NULL,                  -- prompt, tool, agent, approval, callback; run
    parent_id         bigint,                                -- the run it is a step of
    step              text,                                  -- its name in that run
    unmet             integer     NOT NULL DEFAULT 0,        -- dependencies that have not succeeded
    payload           jsonb       NOT NULL,
    metadata          jsonb,                                 -- the submitter's, never looked at

    -- how it came in: one Idempotency-Key makes one task per tenant and endpoint
    idempotency_scope text,                                  -- the endpoint
    idempotency_key   client_key,
    request_hash      bytea,                                 -- of the validated body
    batch_id          bigint,                                -- the first task of its batch
    callback_url      text,                                  -- who is to be told of its end

    -- where it stands
    status            task_status NOT NULL DEFAULT 'PENDING',
    reason            text        NOT NULL DEFAULT 'created',  -- of the last transition
    priority          digit       NOT NULL DEFAULT 0,        -- 9 goes first within a tenant
    available_at      timestamptz NOT NULL DEFAULT current_instant(),
    due               boolean     NOT NULL DEFAULT true,     -- PENDING and available_at has come
    cancel_requested  boolean     NOT NULL DEFAULT false,
    alone             boolean     NOT NULL DEFAULT false,    -- a suspect's last try: see reap_tasks

    -- who works on it
    lease_token       uuid,                                  -- the fencing token, fresh per claim
    lease_expires_at  timestamptz,
    worker            text,                                  -- the last that claimed it
    started_at        timestamptz,                           -- of the last attempt
    attempt           tally       NOT NULL DEFAULT 0,        -- rises at each claim, never falls
    delivery_count    tally       NOT NULL DEFAULT 0,        -- hand-outs worked on or lost
    retry_count       tally       NOT NULL DEFAULT 0,        -- failures of the work itself
    reclaim_count     tally       NOT NULL DEFAULT 0,        -- times the reaper took it back
    gate              jsonb,                                 -- what a parked job asks, and the answer
    max_retry         try_limit,                             -- NULL: [retry] max_retry
    timeout_seconds   time_limit,                            -- NULL: [worker] task_timeout_seconds

    -- what came of it
    result            jsonb,
    result_bytes      bigint,                                -- as text; NULL: see pg_column_size
    last_error        text,
    requested_route   asked_route NOT NULL DEFAULT 'auto',   -- none: it calls no model
    route             taken_route,                           -- chosen by the worker at the claim
    model             text,
    prompt_tokens     tally       NOT NULL DEFAULT 0,
    completion_tokens tally       NOT NULL DEFAULT 0,
    truncated         boolean     NOT NULL DEFAULT false,    -- the model did not see all of it
    cost              amount,                                -- exact; NULL until a call was paid
    duration_seconds  double precision,                      -- of the last attempt
    created_at        timestamptz NOT NULL DEFAULT current_instant(),
    updated_at        timestamptz NOT NULL DEFAULT current_instant(),
    finished_at       timestamptz,

    -- What goes together. Each statement reads all of this from its text: so it is to be short.
    CONSTRAINT step_has_a_run CHECK ((step IS NULL) = (parent_id IS NULL)),
    CONSTRAINT key_has_scope_and_hash CHECK (
        (idempotency_key IS NULL) = (idempotency_scope IS NULL)
        AND (idempotency_key IS NULL) = (request_hash IS NULL)),
    CONSTRAINT counters_count_up CHECK (attempt >= delivery_count),
    CONSTRAINT only_pending_is_due CHECK (NOT due OR status = 'PENDING'),
    CONSTRAINT running_is_leased CHECK (CASE WHEN status = 'RUNNING'
        THEN (lease_token, lease_expires_at, worker, started_at) IS NOT NULL
        ELSE (lease_token, lease_expires_at) IS NULL END),
    CONSTRAINT only_running_is_asked_to_cancel CHECK (
        NOT cancel_requested OR status IN ('RUNNING', 'CANCELLED')
        OR status = 'BLOCKED' AND kind = 'run'),
    CONSTRAINT only_a_step_depends CHECK (unmet >= 0 AND (unmet = 0 OR parent_id IS NOT NULL)),
    CONSTRAINT nothing_unmet_has_begun CHECK (
        unmet = 0 OR status IN ('BLOCKED', 'CANCELLED')),
    CONSTRAINT blocked_waits_for_something CHECK (
        status <> 'BLOCKED' OR unmet > 0 OR kind = 'run'),
    CONSTRAINT run_only_waits_and_ends CHECK (
        kind <> 'run' OR status = 'BLOCKED' OR status >= 'SUCCEEDED'),
    CONSTRAINT run_is_no_step CHECK (kind <> 'run' OR parent_id IS NULL),
    CONSTRAINT nobody_works_on_an_approval CHECK (
        kind <> 'approval' OR status NOT IN ('PENDING', 'RUNNING')),
    CONSTRAINT only_a_job_has_a_gate CHECK (gate IS NULL OR kind = 'agent'),
    CONSTRAINT parked_job_asks_something CHECK (
        status <> 'AWAITING_APPROVAL' OR kind <> 'agent' OR gate IS NOT NULL),
    CONSTRAINT nobody_is_told_of_a_callback CHECK (callback_url IS NULL OR kind <> 'callback'),
    CONSTRAINT final_is_finished CHECK (
        (status >= 'SUCCEEDED') = (finished_at IS NOT NULL)),
    CONSTRAINT succeeded_has_a_result CHECK (
        status <> 'SUCCEEDED' OR result IS NOT NULL OR kind = 'run'),
    CONSTRAINT failed_has_an_error CHECK (
        status <> 'FAILED' OR last_error IS NOT NULL OR kind = 'run')
) WITH (
    -- A claim and a settle rewrite the row: room on its page keeps heartbeats HOT, and a small
    -- share of dead rows is enough to vacuum, at ten times the usual pace: until it is done, claims
    -- and settles find their rows among dead ones.
    fillfactor = 80,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_analyze_scale_factor = 0.02,
    autovacuum_vacuum_cost_limit = 2000
);
COMMENT ON TABLE tasks IS 'One row for each thing that can be claimed, retried, leased or awaited.';

-- claim_tasks: the due tasks of one tenant, in the order in which they are handed out; first the
-- route they ask for, so that tasks of a paused route do not stand in front of the others.
CREATE INDEX tasks_to_claim ON tasks (requested_route, tenant, priority DESC, task_id)
    WHERE due AND NOT alone;
-- claim_suspect.
CREATE INDEX tasks_to_claim_alone ON tasks (task_id) WHERE due AND alone;
-- mark_due and the sleep of an idle worker: what becomes due next.
CREATE INDEX tasks_to_wait_for ON tasks (available_at) WHERE status = 'PENDING' AND NOT due;
-- reap_tasks and --drain: what is leased. The lease itself is in no index, so a heartbeat is HOT. Written
-- so that the planner cannot conclude it from status = 'RUNNING': it takes this index for empty, and a
-- settle of one batch would read all that is leased, and has been since the last vacuum.
CREATE INDEX tasks_leased ON tasks (task_id) WHERE CASE WHEN status = 'RUNNING' THEN true END;
-- submit_tasks: the constraint behind Idempotency-Key.
CREATE UNIQUE INDEX tasks_idempotency ON tasks (tenant, idempotency_scope, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
-- submit_batch, when its Idempotency-Key is known: the tasks behind the first, which has the key.
CREATE INDEX tasks_by_batch ON tasks (batch_id, task_id) WHERE batch_id IS NOT NULL;
-- list_tasks: each kind and status newest first, so that no filter makes it read what it skips.
CREATE INDEX tasks_to_list ON tasks (tenant, kind, status, task_id);
-- list_dead_letters, and their number in read_queue.
CREATE INDEX tasks_dead ON tasks (tenant, task_id)
    WHERE status = 'FAILED' AND kind <> 'run' AND reason <> 'rejected';
-- get_task by name: the newest task that bears it.
CREATE INDEX tasks_by_name ON tasks (tenant, name, task_id) WHERE name IS NOT NULL;
-- submit_task: the constraint behind a task's own name, which is free again once the task has ended.
CREATE UNIQUE INDEX tasks_by_live_name ON tasks (tenant, name)
    WHERE name IS NOT NULL
      AND status IN ('BLOCKED', 'PENDING', 'RUNNING', 'AWAITING_APPROVAL');
-- A step exists once in its run, and no client's key can collide with it.
CREATE UNIQUE INDEX tasks_by_step ON tasks (parent_id, step) WHERE parent_id IS NOT NULL;
-- end_runs: whether a run has a step that has not ended.
CREATE INDEX tasks_unended_steps ON tasks (parent_id)
    WHERE parent_id IS NOT NULL AND status IN ('BLOCKED', 'PENDING', 'RUNNING', 'AWAITING_APPROVAL');


-- The edges of all runs. They never change, and no claim, lease or settle decides by them: what a
-- step still waits for is counted in its own row (unmet).
CREATE TABLE step_edges (
    task_id bigint NOT NULL,                       -- the step that waits
    needs   bigint NOT NULL,                       -- the step it waits for
    PRIMARY KEY (task_id, needs),
    CONSTRAINT parents_have_lower_numbers CHECK (needs < task_id)
);
COMMENT ON TABLE step_edges IS 'Which step of a run depends on which.';
-- end_steps: who waits for a step.
CREATE INDEX step_edges_by_need ON step_edges (needs, task_id);


-- How long a text is that a model is to read, in characters: what routes are decided by.
CREATE FUNCTION prompt_length(payload jsonb) RETURNS integer LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(char_length(coalesce(payload ->> 'prompt', payload ->> 'task')), 0);


-- The tenants that have something due for one of these routes, in alphabetical order, from the
-- first one after `after_tenant` and round to it again; at most `at_most`. One index probe per
-- tenant and route, however many tasks each of them has. Of tasks below `from_task` it does not know.
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
-- so a million delayed ones do not stand in its way.
CREATE FUNCTION mark_due() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF current_instant() >= (
        SELECT available_at FROM tasks
        WHERE status = 'PENDING' AND NOT due ORDER BY available_at LIMIT 1)
    THEN
        UPDATE tasks SET due = true
        WHERE task_id IN (
            SELECT task_id FROM tasks
            WHERE status = 'PENDING' AND NOT due AND available_at <= (SELECT current_instant())
            ORDER BY available_at
            LIMIT 1000
            FOR NO KEY UPDATE SKIP LOCKED);
    END IF;
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

-- The end of every claim: PENDING -> RUNNING (claimed), with a fresh token: 48 random bits and the last 32
-- of the transaction's number, which are of the claim, and the task's number. No two claims of a task have
-- the same, even where somebody has set the seed; and if transactions were lost, with a primary that had
-- not passed them on, and their numbers come again, the random bits tell. gen_random_uuid would
-- open a file each time, where Postgres was built without OpenSSL.
-- Tells of the tasks, the first to begin first, by one list for each column; NULL: there are none.
CREATE FUNCTION lease_tasks(chosen bigint[], by_worker text, lease_seconds double precision)
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

-- Which tasks a claim takes where it cannot take all; they are locked. Fair between tenants: each of those
-- that have something due gives an equal share of the batch, and the round starts after the tenant that
-- was last served. Of each kind of route no more is taken than its budget allows (one that is not named
-- has no limit).
--
-- What was claimed leaves dead entries at the front of the index until they are vacuumed away, and an
-- old snapshot keeps them all: to pass them again and again costs more than all the rest. So a claim
-- can begin at `from_task`, the lowest number that the one before took. It looks at lower ones as
-- well if these do not fill its slots, or are not all of the usual priority: then others, older ones
-- that the one before had no slot for, would be passed over.
CREATE FUNCTION choose_by_shares(
    slots        integer,
    routes       text[],
    wanted       jsonb,
    budgets      jsonb,
    after_tenant text,
    from_task    bigint,
    OUT chosen      bigint[],
    OUT is_auto     boolean,               -- one of them asks for no route
    OUT last_tenant text,                  -- to which the round came; NULL: nothing is due
    OUT is_any_left boolean,               -- NULL: it is to be asked
    OUT next_from   bigint
) LANGUAGE plpgsql AS $$
DECLARE
    tenants text[];
    share   bigint;
BEGIN
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
                   nullif((
                       SELECT max(place_in_tenant) >= share
                              OR count(*) > (SELECT count(*) FROM taken)
                       FROM ranked), false),
                   CASE WHEN count(*) = slots AND bool_and(priority = 0)
                        AND cardinality(tenants) < slots AND budgets = '{}' THEN min(task_id) END
            INTO chosen, is_auto, is_any_left, next_from
            FROM taken;
        END IF;
        EXIT WHEN from_task = 0 OR next_from IS NOT NULL;
        from_task := 0;
    END LOOP;
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


-- Who works here, as the workers say themselves with each heartbeat. Only people and /stats read
-- it: no claim, lease or settle decides by it.
CREATE TABLE workers (
    worker_id     uuid        PRIMARY KEY,
    name          text        NOT NULL,
    concurrency   integer     NOT NULL,
    running       integer     NOT NULL,
    paused_routes jsonb       NOT NULL DEFAULT '{}',  -- {"local": "why"}
    started_at    timestamptz NOT NULL DEFAULT current_instant(),
    seen_at       timestamptz NOT NULL DEFAULT current_instant()
);


-- Who may use the API. As soon as there is a row, revoked or not, every request needs a key, so rows
-- are never deleted. Nobody can tell the secret from its hash: it has 256 random bits.
CREATE TABLE api_keys (
    key_id      text        PRIMARY KEY,
    secret_hash bytea       NOT NULL,              -- sha-256
    tenant      text,                              -- NULL: an operator's, who sees all tenants
    is_operator boolean     NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT current_instant(),
    revoked_at  timestamptz,
    CONSTRAINT key_tenant_is_a_name CHECK (tenant ~ '^[A-Za-z0-9_-]{1,64}$'),
    CONSTRAINT key_is_a_tenants_or_an_operators CHECK (is_operator = (tenant IS NULL)),
    CONSTRAINT key_is_stored_as_its_hash CHECK (octet_length(secret_hash) = 32)
);
COMMENT ON TABLE api_keys IS 'One row for each API key that was ever created.';


-- A browser's streams cannot send a key, so they bring a ticket: good for one path, for seconds.
CREATE TABLE tickets (
    ticket_hash bytea       PRIMARY KEY,
    key_id      text        NOT NULL,              -- whose rights it has, while that is not revoked
    path        text        NOT NULL,
    expires_at  timestamptz NOT NULL
);
COMMENT ON TABLE tickets IS 'Tickets for live events; those that have expired go with the next.';
-- create_ticket: those to be deleted.
CREATE INDEX tickets_by_expiry ON tickets (expires_at);


-- How many requests a tenant has taken in the minute in which it last took some; one row each.
CREATE TABLE tenant_requests (
    tenant text        PRIMARY KEY,
    minute timestamptz NOT NULL,
    taken  bigint      NOT NULL
);
COMMENT ON TABLE tenant_requests IS 'What limits.tenant_requests_per_minute has to know.';


-- The ledger of an agent job's model calls. A call is reserved before it is made, at the most that it
-- can use, and what it used takes the reservation's place once it has ended. When a node runs again,
-- a reply that is here is given to it instead of being paid for again.
CREATE TABLE model_calls (
    call_id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task_id           bigint      NOT NULL,
    node              text        NOT NULL,
    node_run          text        NOT NULL,        -- LangGraph's, the same when that node runs again
    ordinal           integer     NOT NULL,        -- of the call in that run of the node, from 0
    reserved_tokens   bigint      NOT NULL,
    reserved_at       timestamptz NOT NULL DEFAULT current_instant(),
    ended_at          timestamptz,                 -- NULL: it runs, or nobody will ever know
    prompt_tokens     bigint,
    completion_tokens bigint,
    cost              numeric,
    route             text,
    model             text,
    reply             text,                        -- NULL: it brought none
    CONSTRAINT call_uses_no_less_than_nothing CHECK (
        reserved_tokens >= 0 AND prompt_tokens >= 0 AND completion_tokens >= 0 AND cost >= 0),
    CONSTRAINT ended_call_has_its_tokens CHECK (
        (ended_at IS NULL) = (prompt_tokens IS NULL)
        AND (ended_at IS NULL) = (completion_tokens IS NULL)),
    CONSTRAINT only_an_ended_call_has_a_reply CHECK (reply IS NULL OR ended_at IS NOT NULL)
);
COMMENT ON TABLE model_calls IS 'One row for each model call of an agent job.';
-- reserve_call: what a job has spent, and the reply that is there already.
CREATE INDEX model_calls_by_task ON model_calls (task_id, call_id);
CREATE UNIQUE INDEX model_calls_replied ON model_calls (task_id, node_run, ordinal)
    WHERE reply IS NOT NULL;


-- What limits.tenant_tokens_per_day has to know: reserved or used in a day of UTC.
CREATE TABLE tenant_tokens (
    tenant text   NOT NULL,
    day    date   NOT NULL,
    taken  bigint NOT NULL,
    PRIMARY KEY (tenant, day)
);
COMMENT ON TABLE tenant_tokens IS 'Tokens of each tenant''s agent jobs, by day.';


-- What people are shown of an agent job at each of its checkpoints; written with them. LangGraph's
-- own tables, below, hold the same in a form that only its workers read.
CREATE TABLE job_states (
    task_id           bigint      NOT NULL,
    checkpoint_id     text        NOT NULL,        -- LangGraph's; they sort by age
    at                timestamptz NOT NULL DEFAULT current_instant(),
    attempt           bigint      NOT NULL,
    nodes             text[]      NOT NULL,        -- that ran before it
    next_nodes        text[]      NOT NULL,        -- that are to run behind it; none: the job has ended
    graph_version     text        NOT NULL,
    state             jsonb       NOT NULL,
    prompt_tokens     bigint      NOT NULL,        -- of the job, so far
    completion_tokens bigint      NOT NULL,
    PRIMARY KEY (task_id, checkpoint_id)
);
COMMENT ON TABLE job_states IS 'One row for each checkpoint of an agent job.';


-- The first statement of whatever a worker writes of its job: holds the task's row until the
-- transaction's end, or fails, and with it all that was sent behind it in the same message. The
-- statements behind it see all that it has waited for. Returns the tenant.
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


-- What workers write of jobs at every step are functions, because those keep their plans: planning
-- took Postgres more time than all the rest.

-- Sets tokens aside for a model call that has not replied yet. The reply of one that has; or the
-- number of the call; or what refuses it: the job's budget, or its tenant's day. No budget: NULL; no
-- limit of a day: 0.
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

-- Writes what a call used, in the ledger and in the task. A call ends once; its reply is stored
-- unless another call of the same key has stored one.
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

-- Shows a job's state at a checkpoint; what ran before it is what the checkpoint before was to run.
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


-- LangGraph's tables, as langgraph-checkpoint-postgres 3.2 makes them (a test compares), so that no
-- worker has to. A thread is an agent job; its id is the task's number.
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


-- With what a tenant's callbacks are signed. A signature needs the secret itself, not a hash of it.
CREATE TABLE webhook_secrets (
    tenant     text        PRIMARY KEY,
    secret     bytea       NOT NULL,
    created_at timestamptz NOT NULL DEFAULT current_instant(),
    CONSTRAINT secret_tenant_is_a_name CHECK (tenant ~ '^[A-Za-z0-9_-]{1,64}$'),
    CONSTRAINT secret_is_long CHECK (octet_length(secret) BETWEEN 24 AND 64)
);
COMMENT ON TABLE webhook_secrets IS 'One row for each tenant whose callbacks are signed.';


-- What a task that does not run waits for, in the API's words; NULL: for nothing but a free
-- worker, or for the time it was submitted for. A worker counts as present for so many seconds.
CREATE FUNCTION waiting_for(task tasks, present_seconds double precision) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    is_delayed boolean := task.available_at > current_instant();
    backend    text := coalesce(
        task.route, CASE task.requested_route WHEN 'auto' THEN 'local' ELSE task.requested_route END);
BEGIN
    RETURN CASE
        WHEN task.status = 'BLOCKED' THEN 'dependencies'
        WHEN task.status = 'AWAITING_APPROVAL' THEN 'approval'
        WHEN task.status <> 'PENDING' OR is_delayed AND task.reason = 'created' THEN NULL
        WHEN is_delayed AND task.reason = 'outage' OR EXISTS (
            SELECT FROM workers w
            WHERE w.seen_at > current_instant() - make_interval(secs => present_seconds)
              AND w.paused_routes ? backend) THEN 'backend ' || backend
        WHEN is_delayed AND task.reason IN ('retry', 'reaped') THEN 'backoff'
    END;
END $$;


-- Every transition, for ever, in partitions of a month that retention drops whole. `transaction`
-- lets a reader ask for what has become visible since its last snapshot: ids do not come up in
-- the order of commits.
CREATE TABLE audit_log (
    id          bigint      GENERATED ALWAYS AS IDENTITY,
    root_id     bigint      NOT NULL,              -- the run, or a lone task itself
    task_id     bigint      NOT NULL,
    run_id      bigint,                            -- of a step, and of a run's own row
    step        text,
    tenant      text        NOT NULL,
    from_status task_status,
    to_status   task_status NOT NULL,
    reason      text        NOT NULL,
    at          timestamptz NOT NULL DEFAULT current_instant(),
    worker      text,
    attempt     bigint      NOT NULL,
    detail      jsonb       NOT NULL DEFAULT '{}',
    transaction xid8        NOT NULL DEFAULT pg_current_xact_id(),
    PRIMARY KEY (task_id, id, at)                  -- GET /tasks/{id}/audit
) PARTITION BY RANGE (at);
COMMENT ON TABLE audit_log IS 'Append-only: every transition of every task.';

-- GET /runs/{id}/audit.
CREATE INDEX audit_log_by_run ON audit_log (run_id, id) WHERE run_id IS NOT NULL;
-- read_events: what has become visible of a run since a snapshot. A lone task has few rows, and is found
-- by its key.
CREATE INDEX audit_log_by_root ON audit_log (root_id, transaction) WHERE run_id IS NOT NULL;

-- Takes what no month's partition takes, so that a missing partition never stops the work. Of what is
-- never changed nothing dies. A vacuum for the sake of what was added would write each page anew to
-- freeze it, which is put off until Postgres must: a month that retention drops before is never frozen.
CREATE TABLE audit_log_other PARTITION OF audit_log DEFAULT
    WITH (autovacuum_vacuum_insert_threshold = -1);


CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'audit_log is append-only: % refused', TG_OP
        USING ERRCODE = 'insufficient_privilege',
              HINT = 'Old months go by dropping their partition.';
END $$;

CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON audit_log
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON audit_log_other
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();


-- Makes the partitions of this month and the next two, where they are missing; returns how many
-- it made. A month of which audit_log_other already holds rows stays there.
CREATE FUNCTION ensure_audit_partitions() RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    month     timestamp;      -- in UTC: adding a month to a timestamptz obeys the session's zone
    starts    timestamptz;
    ends      timestamptz;
    partition text;
    made      integer := 0;
BEGIN
    FOR ahead IN 0..2 LOOP
        month := date_trunc('month', current_instant() AT TIME ZONE 'UTC')
                 + make_interval(months => ahead);
        starts := month AT TIME ZONE 'UTC';
        ends := (month + interval '1 month') AT TIME ZONE 'UTC';
        partition := 'audit_log_' || to_char(month, 'YYYY_MM');
        CONTINUE WHEN to_regclass(partition) IS NOT NULL;
        PERFORM pg_advisory_xact_lock(hashtext('ensure_audit_partitions'));
        CONTINUE WHEN to_regclass(partition) IS NOT NULL OR EXISTS (
            SELECT FROM audit_log_other
            WHERE at >= starts AND at < ends);
        -- Made apart and then attached: that waits for nobody who only reads or writes this month.
        EXECUTE format(
            'CREATE TABLE %I (LIKE audit_log INCLUDING DEFAULTS INCLUDING INDEXES)
             WITH (autovacuum_vacuum_insert_threshold = -1)', partition);
        EXECUTE format(
            'ALTER TABLE audit_log ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
            partition, starts, ends);
        EXECUTE format(
            'CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON %I
             FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()', partition);
        made := made + 1;
    END LOOP;
    RETURN made;
END $$;
SELECT ensure_audit_partitions();


-- What the audit remembers of a transition beside its two states: what failed, how long it waits,
-- and who did it, where that was a person: whoever acts for one sets orchestrator.acts_for. Not asked
-- for the row as a whole, which would be put together for each call: so it becomes part of the query.
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


-- Workers are woken when something became claimable, and watchers when something changed: by one
-- notification each per statement, and only ids are in it (a payload has a limit of 8,000 bytes; an
-- empty one means "many"). Starting a query costs more than a row in it, so each of these reads the
-- changed rows once.
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

-- A heartbeat, or an update of no row, changes no state: for it, nothing is found. The join is a FULL
-- one, though each row has its pair. The planner knows nothing of the tables of changed rows, and keeps
-- the plan it made for the first few: but this it cannot do by comparing n * n rows.
--
-- Then it tells figure_changes, see there: what is now, less what was before. A heartbeat leaves nothing.
-- Most statements only claim, or only end what has succeeded, and change a few of the figures; to ask for
-- all of them would be a twentieth of a claim of one task.
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

CREATE TRIGGER audit_tasks_created AFTER INSERT ON tasks
    REFERENCING NEW TABLE AS new_tasks
    FOR EACH STATEMENT EXECUTE FUNCTION audit_created_tasks();
CREATE TRIGGER audit_tasks AFTER UPDATE ON tasks
    REFERENCING OLD TABLE AS old_tasks NEW TABLE AS new_tasks
    FOR EACH STATEMENT EXECUTE FUNCTION audit_changed_tasks();


-- How many tasks stand where, exactly, without counting them. Each statement that changes tasks
-- appends to figure_changes what it has changed, one row for each tenant and kind in the same
-- transaction, and fold_figures adds such rows to `figures` now and then. So the figures of a moment
-- are the sums of both tables in one snapshot, and nobody who settles a task waits for anybody: no
-- row is changed by two of them.
CREATE TABLE figures (
    tenant            text    NOT NULL,
    kind              text    NOT NULL,
    blocked           bigint  NOT NULL,            -- tasks by status
    pending           bigint  NOT NULL,
    running           bigint  NOT NULL,
    awaiting_approval bigint  NOT NULL,
    succeeded         bigint  NOT NULL,
    failed            bigint  NOT NULL,
    cancelled         bigint  NOT NULL,
    due               bigint  NOT NULL,            -- of those that are PENDING
    dead              bigint  NOT NULL,            -- of those that FAILED: not by a rejection
    retries           bigint  NOT NULL,            -- sum of retry_count
    reclaimed         bigint  NOT NULL,            -- tasks that lost a worker
    timed             bigint  NOT NULL,            -- SUCCEEDED with a duration
    microseconds      numeric NOT NULL,            -- sum of their durations
    paid_local        bigint  NOT NULL,            -- tasks with a cost, by route
    cost_local        numeric NOT NULL,            -- sum of their costs
    paid_cloud        bigint  NOT NULL,
    cost_cloud        numeric NOT NULL,
    PRIMARY KEY (tenant, kind)
);
COMMENT ON TABLE figures IS 'One row for each tenant and kind of task: what was folded so far.';

-- Without an index: it is short, and every statement that changes tasks writes to it.
CREATE TABLE figure_changes (
    tenant            text    NOT NULL,
    kind              text    NOT NULL,
    blocked           bigint,                      -- NULL: as before
    pending           bigint,
    running           bigint,
    awaiting_approval bigint,
    succeeded         bigint,
    failed            bigint,
    cancelled         bigint,
    due               bigint,
    dead              bigint,
    retries           bigint,
    reclaimed         bigint,
    timed             bigint,
    microseconds      numeric,
    paid_local        bigint,
    cost_local        numeric,
    paid_cloud        bigint,
    cost_cloud        numeric
) WITH (
    -- Every row is deleted soon: vacuum by their number, not by a share of what is there.
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000
);
COMMENT ON TABLE figure_changes IS 'What statements have changed in the figures since they were folded.';

-- What a statement has created or deleted.
CREATE FUNCTION count_tasks() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    n CONSTANT integer := CASE TG_OP WHEN 'DELETE' THEN -1 ELSE 1 END;
BEGIN
    INSERT INTO figure_changes (
        tenant, kind, blocked, pending, running, awaiting_approval, succeeded, failed, cancelled,
        due, dead, retries, reclaimed, timed, microseconds,
        paid_local, cost_local, paid_cloud, cost_cloud)
    SELECT
        tenant, kind,
        sum(n) FILTER (WHERE status = 'BLOCKED'),
        sum(n) FILTER (WHERE status = 'PENDING'),
        sum(n) FILTER (WHERE status = 'RUNNING'),
        sum(n) FILTER (WHERE status = 'AWAITING_APPROVAL'),
        sum(n) FILTER (WHERE status = 'SUCCEEDED'),
        sum(n) FILTER (WHERE status = 'FAILED'),
        sum(n) FILTER (WHERE status = 'CANCELLED'),
        sum(n) FILTER (WHERE due),
        sum(n) FILTER (WHERE status = 'FAILED' AND reason <> 'rejected'),
        sum(n * retry_count),
        sum(n) FILTER (WHERE reclaim_count > 0),
        sum(n) FILTER (WHERE status = 'SUCCEEDED' AND duration_seconds IS NOT NULL),
        sum(n * (duration_seconds * 1000000)::bigint) FILTER (WHERE status = 'SUCCEEDED'),
        sum(n) FILTER (WHERE route = 'local' AND cost IS NOT NULL),
        sum(n * cost) FILTER (WHERE route = 'local'),
        sum(n) FILTER (WHERE route = 'cloud' AND cost IS NOT NULL),
        sum(n * cost) FILTER (WHERE route = 'cloud')
    FROM some_tasks
    GROUP BY tenant, kind;
    RETURN NULL;
END $$;

-- Counts everything anew: after a migration, and for whoever filled the table with its triggers
-- disabled. Nobody changes a task meanwhile.
CREATE FUNCTION recount_figures() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    LOCK TABLE tasks IN SHARE ROW EXCLUSIVE MODE;
    TRUNCATE figures, figure_changes;
    INSERT INTO figures (
        tenant, kind, blocked, pending, running, awaiting_approval, succeeded, failed, cancelled,
        due, dead, retries, reclaimed, timed, microseconds,
        paid_local, cost_local, paid_cloud, cost_cloud)
    SELECT
        tenant, kind,
        count(*) FILTER (WHERE status = 'BLOCKED'),
        count(*) FILTER (WHERE status = 'PENDING'),
        count(*) FILTER (WHERE status = 'RUNNING'),
        count(*) FILTER (WHERE status = 'AWAITING_APPROVAL'),
        count(*) FILTER (WHERE status = 'SUCCEEDED'),
        count(*) FILTER (WHERE status = 'FAILED'),
        count(*) FILTER (WHERE status = 'CANCELLED'),
        count(*) FILTER (WHERE due),
        count(*) FILTER (WHERE status = 'FAILED' AND reason <> 'rejected'),
        sum(retry_count),
        count(*) FILTER (WHERE reclaim_count > 0),
        count(duration_seconds) FILTER (WHERE status = 'SUCCEEDED'),
        coalesce(sum((duration_seconds * 1000000)::bigint) FILTER (WHERE status = 'SUCCEEDED'), 0),
        count(cost) FILTER (WHERE route = 'local'),
        coalesce(sum(cost) FILTER (WHERE route = 'local'), 0),
        count(cost) FILTER (WHERE route = 'cloud'),
        coalesce(sum(cost) FILTER (WHERE route = 'cloud'), 0)
    FROM tasks
    GROUP BY tenant, kind;
END $$;

CREATE FUNCTION forget_figures() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    TRUNCATE figures, figure_changes;
    RETURN NULL;
END $$;

CREATE TRIGGER count_tasks_created AFTER INSERT ON tasks
    REFERENCING NEW TABLE AS some_tasks
    FOR EACH STATEMENT EXECUTE FUNCTION count_tasks();
CREATE TRIGGER count_tasks_deleted AFTER DELETE ON tasks
    REFERENCING OLD TABLE AS some_tasks
    FOR EACH STATEMENT EXECUTE FUNCTION count_tasks();
CREATE TRIGGER count_no_tasks AFTER TRUNCATE ON tasks
    FOR EACH STATEMENT EXECUTE FUNCTION forget_figures();


-- Stores one task that waits for nobody, and returns its number; NULL if its idempotency key has made
-- one before. A function keeps its plan: planning this took Postgres a quarter of the time.
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
-- of those that are steps. Tells what became of which task, one list for each column: it is half as
-- long, and made sooner, than one object for each task. A task that is missing was no longer ours.
-- The verdict becomes a reason (a task that is to be cancelled ends so whatever came of it), and
-- `transitions` says which status that reason leads to. Tokens and money add up over the attempts. A
-- tool may return null, which is a result as well.
--
-- Each row is visited once. If the UPDATE has to wait for one, it judges that row anew, as whoever
-- held it has left it. It takes the rows in the order of `outcome`: with no scan of a whole table or
-- index, it cannot but go through the outcomes and look up one task after the other.
CREATE FUNCTION settle_tasks(
    outcomes jsonb, run_ids bigint[], usual_max_retry integer, usual_max_delay double precision
) RETURNS json LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    leads_to CONSTANT jsonb := (
        SELECT jsonb_object_agg(reason, to_status) FROM transitions WHERE from_status = 'RUNNING');
    moment    timestamptz;
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

    moment := current_instant();
    WITH outcome AS (
        SELECT * FROM jsonb_to_recordset(outcomes) AS o(
            task_id bigint, token uuid, verdict text, result jsonb, error text, route text,
            model text, prompt_tokens bigint, completion_tokens bigint, cost numeric,
            truncated boolean, delay_seconds double precision, gate jsonb,
            max_retry integer, max_delay_seconds double precision)
        ORDER BY task_id
    ),
    settled AS (
        UPDATE tasks t
        SET (status, reason, delivery_count, gate, due, available_at,
             result, result_bytes, last_error, finished_at) = (
            SELECT to_status, new_reason,
                   t.delivery_count - (new_reason IN ('released', 'outage', 'parked'))::int,
                   CASE WHEN new_reason = 'parked' THEN o.gate ELSE t.gate END,
                   to_status = 'PENDING' AND wait_seconds = 0,
                   CASE WHEN to_status = 'PENDING' THEN moment + make_interval(secs => wait_seconds)
                        ELSE t.available_at END,
                   CASE WHEN to_status = 'SUCCEEDED' THEN coalesce(o.result, 'null') END,
                   CASE WHEN to_status = 'SUCCEEDED' THEN octet_length(o.result::text) END,
                   CASE WHEN to_status <> 'SUCCEEDED' THEN coalesce(o.error, t.last_error) END,
                   CASE WHEN to_status >= 'SUCCEEDED' THEN moment END
            FROM (
                SELECT judged.*, (leads_to ->> new_reason)::task_status AS to_status
                FROM (
                    SELECT CASE
                               WHEN t.cancel_requested THEN 'cancelled'
                               WHEN o.verdict <> 'failure' THEN o.verdict
                               WHEN t.retry_count + 1
                                    >= coalesce(t.max_retry, o.max_retry, usual_max_retry)
                               THEN 'max_retry'
                               ELSE 'retry'
                           END AS new_reason,
                           CASE
                               WHEN o.verdict = 'failure'
                               THEN least(coalesce(o.max_delay_seconds, usual_max_delay),
                                          power(2, least(t.retry_count + 1, 60)))
                               ELSE coalesce(o.delay_seconds, 0)
                           END AS wait_seconds
                    OFFSET 0) AS judged
                OFFSET 0) AS decided),
            route = coalesce(o.route, t.route),
            model = coalesce(o.model, t.model),
            prompt_tokens = t.prompt_tokens + coalesce(o.prompt_tokens, 0),
            completion_tokens = t.completion_tokens + coalesce(o.completion_tokens, 0),
            cost = CASE WHEN o.cost IS NULL THEN t.cost ELSE coalesce(t.cost, 0) + o.cost END,
            truncated = coalesce(o.truncated, false),
            retry_count = t.retry_count
                + (o.verdict IN ('failure', 'permanent', 'deadline', 'recursion_limit'))::int,
            duration_seconds = extract(epoch FROM moment - t.started_at),
            lease_token = NULL,
            lease_expires_at = NULL,
            updated_at = moment
        FROM outcome o
        WHERE t.task_id = ANY(ARRAY[o.task_id])
          AND t.status IS NOT DISTINCT FROM 'RUNNING'
          AND t.lease_token IS NOT DISTINCT FROM o.token
        RETURNING t.task_id, t.parent_id AS run_id, o.token, t.status, t.reason, t.attempt,
                  t.retry_count, t.delivery_count,
                  CASE WHEN t.status = 'PENDING'
                       THEN extract(epoch FROM t.available_at - t.updated_at) END AS delay_seconds,
                  t.last_error AS error, t.truncated
    )
    SELECT CASE WHEN count(*) > 0 THEN json_build_array(
               json_agg(task_id), json_agg(run_id), json_agg(token), json_agg(status),
               json_agg(reason), json_agg(attempt), json_agg(retry_count),
               json_agg(delivery_count), json_agg(delay_seconds), json_agg(error),
               json_agg(truncated)) END,
           array_agg(task_id) FILTER (WHERE run_id IS NOT NULL AND status = 'SUCCEEDED'),
           array_agg(task_id) FILTER (
               WHERE run_id IS NOT NULL AND status IN ('FAILED', 'CANCELLED')),
           array_agg(run_id) FILTER (WHERE run_id IS NOT NULL AND status >= 'SUCCEEDED')
    INTO told, succeeded, dead, ended_in
    FROM settled;

    IF ended_in IS NOT NULL THEN
        PERFORM end_steps(succeeded, dead, ARRAY(SELECT DISTINCT unnest(ended_in)));
    END IF;
    RETURN told;
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


-- RUNNING -> PENDING (reaped), FAILED (max_delivery) or CANCELLED, where the lease has run out: up to
-- `at_most` tasks of higher numbers than `after_task`, lowest first, or `only_task`. It tells what became
-- of which as settle_tasks does, and waits for nobody: a step whose run somebody holds has to wait for the
-- next round.
--
-- Of tasks that went down with one process, one may be poison. They come back spread over a few
-- seconds, and a task with one try left gets it alone, in a process of its own: so poison takes no
-- healthy neighbour with it.
CREATE FUNCTION reap_tasks(
    usual_max_delivery integer,
    spread_seconds     double precision,
    at_most            integer,
    after_task         bigint,
    only_task          bigint              -- NULL: any
) RETURNS json LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    told     json;
    dead     bigint[];
    ended_in bigint[];  -- their runs
    locked   CONSTANT bigint[] := ARRAY(
        SELECT run.task_id FROM tasks run
        WHERE run.task_id = ANY(ARRAY(
            SELECT t.parent_id FROM tasks t
            WHERE CASE WHEN t.status = 'RUNNING' THEN true END  -- as tasks_leased has it
              AND t.lease_expires_at < current_instant()
              AND t.task_id > after_task AND (only_task IS NULL OR t.task_id = only_task)))
        ORDER BY run.task_id
        LIMIT at_most
        FOR NO KEY UPDATE SKIP LOCKED);
BEGIN
    WITH expired AS (
        SELECT t.task_id, t.lease_token, t.cancel_requested, t.delivery_count - t.retry_count AS losses
        FROM tasks t
        WHERE CASE WHEN t.status = 'RUNNING' THEN true END AND t.lease_expires_at < current_instant()
          AND t.task_id > after_task AND (only_task IS NULL OR t.task_id = only_task)
          AND CASE WHEN t.parent_id IS NULL THEN true ELSE t.parent_id = ANY(locked) END
        ORDER BY t.task_id
        LIMIT at_most
        FOR NO KEY UPDATE SKIP LOCKED
    ),
    judged AS (
        SELECT task_id, lease_token,
               CASE
                   WHEN cancel_requested THEN 'cancelled'
                   WHEN losses >= usual_max_delivery THEN 'max_delivery'
                   ELSE 'reaped'
               END AS new_reason,
               losses >= usual_max_delivery - 1 AS is_suspect,
               random() * spread_seconds AS wait_seconds
        FROM expired  -- as it was locked: what the snapshot saw may be older
    ),
    decided AS (
        SELECT judged.*, transitions.to_status
        FROM judged JOIN transitions
            ON transitions.from_status = 'RUNNING' AND transitions.reason = judged.new_reason
    ),
    moment AS (SELECT current_instant() AS at),
    reaped AS (
        UPDATE tasks t
        SET status = d.to_status,
            reason = d.new_reason,
            last_error = CASE
                WHEN d.new_reason = 'max_delivery' THEN format(
                    'handed out %s times and each time the worker was lost; the last was %s',
                    t.delivery_count - t.retry_count, t.worker)
                ELSE t.last_error END,
            reclaim_count = t.reclaim_count + 1,
            alone = d.is_suspect AND d.to_status = 'PENDING',
            lease_token = NULL,
            lease_expires_at = NULL,
            due = d.to_status = 'PENDING' AND d.wait_seconds = 0,
            available_at = CASE
                WHEN d.to_status = 'PENDING' THEN moment.at + make_interval(secs => d.wait_seconds)
                ELSE t.available_at END,
            updated_at = moment.at,
            finished_at = CASE WHEN d.to_status <> 'PENDING' THEN moment.at END
        FROM decided d CROSS JOIN moment
        WHERE t.task_id = ANY(ARRAY[d.task_id])
          AND t.status IS NOT DISTINCT FROM 'RUNNING'
          AND t.lease_token IS NOT DISTINCT FROM d.lease_token
        RETURNING t.task_id, t.parent_id AS run_id, d.lease_token AS token, t.status, t.reason,
                  t.attempt, t.retry_count, t.delivery_count,
                  CASE WHEN t.status = 'PENDING' THEN d.wait_seconds END AS delay_seconds,
                  t.last_error AS error, t.truncated
    )
    SELECT CASE WHEN count(*) > 0 THEN json_build_array(
               json_agg(task_id), json_agg(run_id), json_agg(token), json_agg(status),
               json_agg(reason), json_agg(attempt), json_agg(retry_count),
               json_agg(delivery_count), json_agg(delay_seconds), json_agg(error),
               json_agg(truncated)) END,
           array_agg(task_id) FILTER (WHERE run_id IS NOT NULL AND status <> 'PENDING'),
           array_agg(DISTINCT run_id) FILTER (WHERE run_id IS NOT NULL AND status <> 'PENDING')
    INTO told, dead, ended_in
    FROM reaped;

    IF ended_in IS NOT NULL THEN
        PERFORM end_steps(NULL, dead, ended_in);
    END IF;
    RETURN told;
END $$;


-- The way in for programs whose own data is in this database: the task is stored in the caller's
-- transaction, so that both are committed or neither is; then it is claimable, and a worker wakes.
--
--     BEGIN;
--     INSERT INTO orders …;
--     SELECT submit_task('Thank the customer of order 7.', priority => 5);
--     COMMIT;
--
-- Returns the task's number. The same idempotency_key with the same arguments returns the first
-- task's; with others it is refused (unique_violation). These keys are apart from those of the
-- HTTP API. What cannot be a task is refused in plain words (invalid_parameter_value); the limits
-- of config.toml are not known here. The caller's role needs INSERT and SELECT on tasks, SELECT on
-- transitions, INSERT on audit_log and figure_changes, and EXECUTE on create_task,
-- where that is not everybody's.
CREATE FUNCTION submit_task(
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
