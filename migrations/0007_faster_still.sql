-- Version 7: functions that do less.

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
