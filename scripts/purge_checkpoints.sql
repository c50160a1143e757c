-- Deletes the checkpoints that nobody needs any more: of agent jobs that finished more than so many
-- days ago, all but the latest of each namespace, with what was written for them and what was shown
-- of them; a blob goes when no kept checkpoint names its version.
--
--     psql "$DATABASE_URL" -v days=30 -f scripts/purge_checkpoints.sql
--
-- `python admin.py purge` runs the statement below too, with the days of retention.checkpoints_days.
-- It waits for no row: it locks the task's own, so that nobody requeues the job meanwhile, and a job
-- that somebody else holds stays for the next time. Left alone are jobs that have not finished, and
-- threads whose latest checkpoint is of no use without the older ones (a channel of theirs is the sum
-- of its writes: LangGraph's DeltaChannel) or cannot be read. Each round is a transaction of its own,
-- for the threads behind those of the round before.

\set ON_ERROR_STOP on
\if :{?days}
\else
  DO $$ BEGIN RAISE EXCEPTION 'say how many days are kept: psql -v days=30'; END $$;
\endif
\if :{?after_thread}
\else
  \set after_thread ''
\endif
\if :{?batch_rows}
\else
  \set batch_rows 500
\endif

WITH page AS MATERIALIZED (
    -- Read from the primary key alone: a thread that was purged before has one checkpoint.
    SELECT DISTINCT several.thread_id
    FROM (
        SELECT thread_id FROM checkpoints
        WHERE thread_id > :'after_thread'
        GROUP BY thread_id, checkpoint_ns
        HAVING count(*) > 1
    ) AS several
    ORDER BY several.thread_id
    LIMIT :batch_rows
),
job AS MATERIALIZED (
    SELECT page.thread_id
    FROM page JOIN tasks t ON t.task_id = CASE
        WHEN page.thread_id ~ '^[1-9][0-9]{0,17}$' THEN page.thread_id::bigint END
    WHERE t.kind = 'agent' AND t.status IN ('SUCCEEDED', 'FAILED', 'CANCELLED')
      AND t.finished_at < (SELECT current_instant() - make_interval(days => :days))
      AND NOT EXISTS (
        SELECT FROM checkpoints c
        WHERE c.thread_id = page.thread_id AND (
            jsonb_typeof(c.checkpoint -> 'channel_versions') IS DISTINCT FROM 'object'
            OR c.metadata ? 'counters_since_delta_snapshot'
            OR EXISTS (
                SELECT FROM jsonb_each(c.checkpoint -> 'channel_values') AS held
                JOIN checkpoint_blobs b ON b.thread_id = c.thread_id
                    AND b.checkpoint_ns = c.checkpoint_ns AND b.channel = held.key
                    AND b.version = c.checkpoint -> 'channel_versions' ->> held.key
                WHERE held.value = 'true')))
    ORDER BY t.task_id
    FOR UPDATE OF t SKIP LOCKED
),
latest AS MATERIALIZED (
    SELECT DISTINCT ON (c.thread_id, c.checkpoint_ns)
           c.thread_id, c.checkpoint_ns, c.checkpoint_id,
           c.metadata -> 'parents' ->> '' AS called_by,
           c.checkpoint -> 'channel_versions' AS versions
    FROM checkpoints c JOIN job USING (thread_id)
    ORDER BY c.thread_id, c.checkpoint_ns, c.checkpoint_id DESC
),
kept AS MATERIALIZED (
    -- The namespace of one call of a subgraph goes with the checkpoint that made the call.
    SELECT latest.* FROM latest
    LEFT JOIN latest AS root ON root.thread_id = latest.thread_id AND root.checkpoint_ns = ''
    WHERE strpos(latest.checkpoint_ns, ':') = 0
       OR (latest.called_by < root.checkpoint_id) IS NOT TRUE
),
named AS MATERIALIZED (
    SELECT kept.thread_id, kept.checkpoint_ns, version.key AS channel, version.value AS version
    FROM kept CROSS JOIN LATERAL jsonb_each_text(kept.versions) AS version
),
gone_checkpoints AS (
    DELETE FROM checkpoints c USING job
    WHERE c.thread_id = job.thread_id AND NOT EXISTS (
        SELECT FROM kept
        WHERE kept.thread_id = c.thread_id AND kept.checkpoint_ns = c.checkpoint_ns
          AND kept.checkpoint_id = c.checkpoint_id)
    RETURNING c.thread_id
),
gone_writes AS (
    DELETE FROM checkpoint_writes w USING job
    WHERE w.thread_id = job.thread_id AND NOT EXISTS (
        SELECT FROM kept
        WHERE kept.thread_id = w.thread_id AND kept.checkpoint_ns = w.checkpoint_ns
          AND kept.checkpoint_id = w.checkpoint_id)
    RETURNING w.thread_id
),
gone_blobs AS (
    DELETE FROM checkpoint_blobs b USING job
    WHERE b.thread_id = job.thread_id AND NOT EXISTS (
        SELECT FROM named
        WHERE named.thread_id = b.thread_id AND named.checkpoint_ns = b.checkpoint_ns
          AND named.channel = b.channel AND named.version = b.version)
    RETURNING b.thread_id
),
gone_states AS (
    DELETE FROM job_states s USING latest
    WHERE s.task_id = latest.thread_id::bigint AND latest.checkpoint_ns = ''
      AND s.checkpoint_id < latest.checkpoint_id
    RETURNING s.task_id
),
orphaned AS (
    -- What is kept has no parent any more.
    UPDATE checkpoints c SET parent_checkpoint_id = NULL FROM kept
    WHERE c.thread_id = kept.thread_id AND c.checkpoint_ns = kept.checkpoint_ns
      AND c.checkpoint_id = kept.checkpoint_id AND c.parent_checkpoint_id IS NOT NULL
)
SELECT (SELECT count(*) FROM job) AS jobs,
       (SELECT count(*) FROM gone_checkpoints) AS checkpoints,
       (SELECT count(*) FROM gone_writes) AS writes,
       (SELECT count(*) FROM gone_blobs) AS blobs,
       (SELECT count(*) FROM gone_states) AS states,
       (SELECT max(thread_id) FROM page) AS after_thread
\gset

\if :{?after_thread}
  \echo Jobs :jobs, checkpoints :checkpoints, writes :writes, blobs :blobs, states :states
  \ir purge_checkpoints.sql
\endif
