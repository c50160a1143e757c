-- Version 8: tasks are vacuumed at ten times the pace, the audit log no longer for what was added to it.

ALTER TABLE tasks SET (autovacuum_vacuum_cost_limit = 2000);

DO $$
DECLARE
    partition regclass;
BEGIN
    FOR partition IN SELECT inhrelid FROM pg_inherits WHERE inhparent = 'audit_log'::regclass LOOP
        EXECUTE format('ALTER TABLE %s SET (autovacuum_vacuum_insert_threshold = -1)', partition);
    END LOOP;
END $$;

CREATE OR REPLACE FUNCTION ensure_audit_partitions() RETURNS integer LANGUAGE plpgsql AS $$
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
