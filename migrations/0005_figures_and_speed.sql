-- Version 5: figures that are kept by triggers instead of being counted.

LOCK TABLE tasks IN SHARE ROW EXCLUSIVE MODE;

CREATE TABLE figures (
    tenant            text    NOT NULL,
    kind              text    NOT NULL,
    blocked           bigint  NOT NULL,
    pending           bigint  NOT NULL,
    running           bigint  NOT NULL,
    awaiting_approval bigint  NOT NULL,
    succeeded         bigint  NOT NULL,
    failed            bigint  NOT NULL,
    cancelled         bigint  NOT NULL,
    due               bigint  NOT NULL,
    dead              bigint  NOT NULL,
    retries           bigint  NOT NULL,
    reclaimed         bigint  NOT NULL,
    timed             bigint  NOT NULL,
    microseconds      numeric NOT NULL,
    paid_local        bigint  NOT NULL,
    cost_local        numeric NOT NULL,
    paid_cloud        bigint  NOT NULL,
    cost_cloud        numeric NOT NULL,
    PRIMARY KEY (tenant, kind)
);
COMMENT ON TABLE figures IS 'One row for each tenant and kind of task: what was folded so far.';

CREATE TABLE figure_changes (
    tenant            text    NOT NULL,
    kind              text    NOT NULL,
    blocked           bigint,
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
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000
);
COMMENT ON TABLE figure_changes IS 'What statements have changed in the figures since they were folded.';

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

CREATE FUNCTION count_changed_tasks() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO figure_changes (
        tenant, kind, blocked, pending, running, awaiting_approval, succeeded, failed, cancelled,
        due, dead, retries, reclaimed, timed, microseconds,
        paid_local, cost_local, paid_cloud, cost_cloud)
    SELECT *
    FROM (
        SELECT
            tenant, kind,
            nullif(sum(n) FILTER (WHERE status = 'BLOCKED'), 0) AS blocked,
            nullif(sum(n) FILTER (WHERE status = 'PENDING'), 0) AS pending,
            nullif(sum(n) FILTER (WHERE status = 'RUNNING'), 0) AS running,
            nullif(sum(n) FILTER (WHERE status = 'AWAITING_APPROVAL'), 0) AS awaiting_approval,
            nullif(sum(n) FILTER (WHERE status = 'SUCCEEDED'), 0) AS succeeded,
            nullif(sum(n) FILTER (WHERE status = 'FAILED'), 0) AS failed,
            nullif(sum(n) FILTER (WHERE status = 'CANCELLED'), 0) AS cancelled,
            nullif(sum(n) FILTER (WHERE due), 0) AS due,
            nullif(sum(n) FILTER (WHERE status = 'FAILED' AND reason <> 'rejected'), 0) AS dead,
            nullif(sum(n * retry_count), 0) AS retries,
            nullif(sum(n) FILTER (WHERE reclaim_count > 0), 0) AS reclaimed,
            nullif(sum(n) FILTER (
                WHERE status = 'SUCCEEDED' AND duration_seconds IS NOT NULL), 0) AS timed,
            nullif(sum(n * (duration_seconds * 1000000)::bigint) FILTER (
                WHERE status = 'SUCCEEDED'), 0) AS microseconds,
            nullif(sum(n) FILTER (WHERE route = 'local' AND cost IS NOT NULL), 0) AS paid_local,
            nullif(sum(n * cost) FILTER (WHERE route = 'local'), 0) AS cost_local,
            nullif(sum(n) FILTER (WHERE route = 'cloud' AND cost IS NOT NULL), 0) AS paid_cloud,
            nullif(sum(n * cost) FILTER (WHERE route = 'cloud'), 0) AS cost_cloud
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
    WHERE num_nonnulls(
        blocked, pending, running, awaiting_approval, succeeded, failed, cancelled, due, dead,
        retries, reclaimed, timed, microseconds, paid_local, cost_local, paid_cloud, cost_cloud) > 0;
    RETURN NULL;
END $$;

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
CREATE TRIGGER count_tasks_changed AFTER UPDATE ON tasks
    REFERENCING OLD TABLE AS old_tasks NEW TABLE AS new_tasks
    FOR EACH STATEMENT EXECUTE FUNCTION count_changed_tasks();
CREATE TRIGGER count_tasks_deleted AFTER DELETE ON tasks
    REFERENCING OLD TABLE AS some_tasks
    FOR EACH STATEMENT EXECUTE FUNCTION count_tasks();
CREATE TRIGGER count_no_tasks AFTER TRUNCATE ON tasks
    FOR EACH STATEMENT EXECUTE FUNCTION forget_figures();

SELECT recount_figures();

-- Roles that may do no more than submit tasks in their own transactions write here from now on, too.
DO $$
DECLARE
    submitter text;
BEGIN
    FOR submitter IN
        SELECT CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END
        FROM pg_class CROSS JOIN aclexplode(relacl)
        WHERE oid = 'audit_log'::regclass AND privilege_type = 'INSERT'
    LOOP
        EXECUTE 'GRANT INSERT ON figure_changes TO ' || submitter;
    END LOOP;
END $$;

-- The same rules as before, in a form that costs a tenth at each update of a row.
ALTER TABLE tasks
    DROP CONSTRAINT tenant_is_a_name,
    DROP CONSTRAINT name_is_a_name_and_no_number,
    ADD CONSTRAINT tenant_is_a_name
        CHECK (tenant ~ '^[A-Za-z0-9_-]+$' AND char_length(tenant) <= 64),
    ADD CONSTRAINT name_is_a_name_and_no_number CHECK (
        name ~ '^[A-Za-z0-9_-]+$' AND char_length(name) <= 64 AND name !~ '^[0-9]+$');

-- A settle goes by the primary key and not through all that is leased.
DROP INDEX tasks_leased;
CREATE INDEX tasks_leased ON tasks (task_id) WHERE CASE WHEN status = 'RUNNING' THEN true END;

-- Both bounds of the second round are the index's.
CREATE OR REPLACE FUNCTION due_tenants(routes text[], after_tenant text, at_most integer)
RETURNS TABLE (place integer, tenant text) LANGUAGE plpgsql STABLE AS $$
DECLARE
    last_tenant text := '~';  -- sorts behind every name
BEGIN
    place := 0;
    tenant := after_tenant;
    WHILE place < at_most LOOP
        -- Both bounds are the index's: a condition beside them would be asked of each row in turn.
        SELECT min(first_of_route.tenant) INTO tenant
        FROM unnest(routes) AS asked(route) CROSS JOIN LATERAL (
            SELECT t.tenant FROM tasks t
            WHERE t.due AND NOT t.alone AND t.requested_route = asked.route
              AND t.tenant > due_tenants.tenant AND t.tenant <= last_tenant
            ORDER BY t.tenant
            LIMIT 1) AS first_of_route;
        IF tenant IS NOT NULL THEN
            place := place + 1;
            RETURN NEXT;
        ELSIF last_tenant = after_tenant THEN
            RETURN;
        ELSE
            last_tenant := after_tenant;
            tenant := '';
        END IF;
    END LOOP;
END $$;
