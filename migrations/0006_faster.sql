-- Version 6: functions and triggers that keep their plans and do less.

LOCK TABLE tasks IN SHARE ROW EXCLUSIVE MODE;

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

-- The end of every claim: PENDING -> RUNNING (claimed), with a fresh token.
CREATE FUNCTION lease_tasks(chosen bigint[], by_worker text, lease_seconds double precision)
RETURNS json LANGUAGE plpgsql AS $$
DECLARE
    leased json;
BEGIN
    WITH claimed AS (
        UPDATE tasks t
        SET status = 'RUNNING', reason = 'claimed', due = false,
            lease_token = gen_random_uuid(),
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
    tenants text[];
    share   bigint;
    chosen  bigint[];
    is_auto boolean;
BEGIN
    next_due_seconds := mark_due();
    LOOP
        tenants := ARRAY(
            SELECT tenant FROM due_tenants(
                ARRAY(SELECT asked ->> 'requested_route' FROM jsonb_array_elements(wanted) AS asked),
                after_tenant, slots, from_task)
            ORDER BY place);
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
    IF is_auto THEN
        depth := count_due(depth_limit);
    END IF;
    has_suspect := (
        SELECT t.task_id FROM tasks t
        WHERE t.due AND t.alone AND is_wanted(wanted, t.requested_route, t.payload)
        ORDER BY t.task_id LIMIT 1) IS NOT NULL;
END $$;

-- Leases a task that has its last try, alone: no other may share a process with it.
CREATE FUNCTION claim_suspect(
    by_worker text, lease_seconds double precision, wanted jsonb
) RETURNS json LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    chosen bigint;
BEGIN
    SELECT t.task_id INTO chosen FROM tasks t
    WHERE t.due AND t.alone AND is_wanted(wanted, t.requested_route, t.payload)
    ORDER BY t.task_id
    LIMIT 1
    FOR NO KEY UPDATE SKIP LOCKED;
    RETURN lease_tasks(ARRAY[chosen], by_worker, lease_seconds);
END $$;
