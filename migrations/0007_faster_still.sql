-- Version 7: claims that take all that is due, settles that visit a row once, a reaper in one message.

DROP FUNCTION mark_due();
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


-- The end of every claim: PENDING -> RUNNING (claimed), with a fresh token. A token is 74 random bits of
-- its claim and the task's number: to draw one for each task would be a seventh of the claim's time.
-- Tells of the tasks, the first to begin first, by one list for each column; NULL: there are none.
CREATE OR REPLACE FUNCTION lease_tasks(chosen bigint[], by_worker text, lease_seconds double precision)
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
-- first in the index), and else by shares.
CREATE OR REPLACE FUNCTION claim_tasks(
    by_worker     text,
    slots         integer,
    lease_seconds double precision,
    wanted        jsonb,
    budgets       jsonb,                   -- {}: none has a limit, and `wanted` names routes only
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
    waiting bigint;  -- NULL: not counted
    chosen  bigint[];
    is_auto boolean;
BEGIN
    FOR look IN 1..2 LOOP
        SELECT CASE WHEN from_task = 0 AND budgets = '{}' THEN (
                   SELECT count(*) FROM (
                       SELECT FROM unnest(routes) AS asked(route) CROSS JOIN LATERAL (
                           SELECT FROM tasks t
                           WHERE t.due AND NOT t.alone AND t.requested_route = asked.route
                           ORDER BY t.tenant, t.priority DESC, t.task_id
                           LIMIT slots + 1) AS of_route
                       LIMIT slots + 1) AS due) END,
               (SELECT t.task_id FROM tasks t
                WHERE t.due AND t.alone AND t.requested_route = ANY(routes)
                  AND is_wanted(wanted, t.requested_route, t.payload)
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
CREATE OR REPLACE FUNCTION settle_tasks(
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
