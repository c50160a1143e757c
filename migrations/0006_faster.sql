-- Version 6: functions and triggers that keep their plans and do less.

LOCK TABLE tasks IN SHARE ROW EXCLUSIVE MODE;

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
