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
